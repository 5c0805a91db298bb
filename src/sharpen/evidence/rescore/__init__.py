"""Another judge over the rollouts that a run has stored, and what it would have changed.

- `scores`: runs a judge over stored rollouts
- `changes`: what its rewards would have changed
"""
