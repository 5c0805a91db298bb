"""The `sharpen` command: run, check, eval."""
