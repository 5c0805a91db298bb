"""The report of a run: one self-contained page, the same as Markdown, and a card for each checkpoint."""
