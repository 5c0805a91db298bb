"""A model served to applications, outside of any run."""
