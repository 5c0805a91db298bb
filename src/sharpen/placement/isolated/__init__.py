"""Attempts in processes of their own, without Ray.

- `messages`: what run and worker say to each other
- `pool`: the run's side: attempts shared out over workers
- `process`: one worker as the run sees it
- `worker`: the worker itself
- `models`: the models of an attempt there
"""
