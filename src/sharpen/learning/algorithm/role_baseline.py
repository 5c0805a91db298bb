"""Moving baselines of `rae`, one for each role.

In: the rows of tasks, and the rewards of each step. Out: the role of a task, and the baselines after a step. Nothing is
kept here: a run has its baselines in its checkpoints (`run.progress`).

Source: role-conditioned advantage estimation, SPIRAL, arXiv 2506.24119, section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from sharpen.errors import DatasetError
from sharpen.types import Task

Roles = Mapping[str, float]
"""The baseline of each role, in units of the reward; 0 for a role that no step had."""


def role_of(task: Task, fields: Sequence[str]) -> str:
    """Return the role of a task: what its row has in `fields`, joined by `/`; "" without fields. Raises `DatasetError`
    for a row without one of them."""
    if missing := [name for name in fields if name not in task.row]:
        raise DatasetError(
            f"loss.advantage_args.roles has {missing[0]!r}, and task {task.id} has no such field (it has "
            f"{', '.join(map(str, task.row)) or 'none'}): give it one, or leave it out of roles"
        )
    return "/".join(str(task.row[name]) for name in fields)


def moved(baselines: Roles, rewards: Mapping[str, Sequence[float]], *, decay: float) -> dict[str, float]:
    """Return the baselines after a step with these rewards of each role: `m + decay^n (b - m)` for n rewards of mean m.

    That is `decay b + (1 - decay) r` for each reward, with their mean for each, so that their order does not matter.
    """
    result = dict(baselines)
    for role, values in rewards.items():
        if values:
            mean = fmean(values)
            result[role] = mean + decay ** len(values) * (baselines.get(role, 0.0) - mean)
    return result
