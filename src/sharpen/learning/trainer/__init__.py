"""Batches of experiences in; updated weights, checkpoints and step metrics out."""
