"""The `agenttune` command: run, check, eval."""
