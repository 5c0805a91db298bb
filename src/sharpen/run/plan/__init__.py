"""Predicts the memory and time of a run before it starts, and what to change if it does not fit."""
