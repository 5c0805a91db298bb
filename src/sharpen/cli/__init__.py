"""The `sharpen` command line."""
