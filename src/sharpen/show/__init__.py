"""What people look at: the live display, metrics and monitors, `sharpen view`, reports and cards.

In: metrics, and run directories, which it reads and never writes. Out: pages, tables, pictures. It must not know how
anything that it shows was made.

- `monitor/`: what a run says while it works and at its end
- `view/`: `sharpen view`, pages over runs
- `report/`: a run as one page, and cards of its checkpoints
"""
