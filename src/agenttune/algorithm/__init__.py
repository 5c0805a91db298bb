"""Tensors in; advantages, losses and metrics out. Pure maths, no I/O."""
