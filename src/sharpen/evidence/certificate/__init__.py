"""Checks what a run trained against its records, with code of its own: in every step, and offline from `run.db`."""
