"""What the pages show: typed, plain records, made by pure functions from a run's files and its index. No HTML.

- `runs`: the table of runs
- `run`: one run: does it learn, is it sound, where does its time go
- `tasks`: a run's tasks, one task, one step
- `rollout`: one rollout, and the tokens of a call
- `messages`: its messages, and how its calls follow from each other
- `search`: rollouts that match
- `compare`: runs side by side
- `measures`: numbers with intervals, series, JSON
"""
