"""The formats in which models write tool calls and reasoning: one file for each family."""
