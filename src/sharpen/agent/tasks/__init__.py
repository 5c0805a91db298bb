"""Reads datasets, and draws `Task`s in an order whose position can be saved.

- `data`: what a run trains on and what it is evaluated on
- `order`: the order in which tasks are drawn, whose position is saved; also by difficulty
- `images`: the images in a row, as parts of messages
"""
