"""What an explorer and a trainer in separate processes hand to each other: rollouts one way, weights the other.

- `store`: where things are left for the other side: a folder or a database
- `database`: the same in PostgreSQL
- `announcement`: what an explorer says of itself first
- `batch`: the rollouts of a step as bytes
- `weights`: weights on their way to an explorer
- `migrations/`: the tables of the database
"""
