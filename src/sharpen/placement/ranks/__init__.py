"""A trainer of several processes: the code of each rank, and the coordinator's side.

- `group`: the trainer as the run sees it
- `rank`: one rank of it
- `processes`: ranks as processes of this machine, and the memory that they share
- `main`: the program of such a process
- `answers`: the ranks' answers as one
"""
