"""The configuration of a run: YAML and keyword arguments, resolved into one validated, immutable object."""
