"""Looks at a machine: what a run needs, what is here, what to do.

- `command`: all checks, and what to do
- `checks`: of the machine, one by one; how one runs in a process of its own
- `gradients`: of a model's gradients here
- `step`: of a whole step with a tiny model
"""
