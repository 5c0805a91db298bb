"""Decides when engines load a new policy version."""
