"""The report of a run: one self-contained page, the same as Markdown, and a card for each checkpoint.

- `contents`: what a report says, in order, its evaluations task by task
- `render`: as a page, as Markdown
- `card`: the card of a checkpoint
- `templates/`: the page, the Markdown and the card
"""
