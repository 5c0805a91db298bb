"""Several runs of one configuration: other seeds, other settings."""
