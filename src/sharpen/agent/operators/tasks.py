"""The built-in operators on tasks.

In: the tasks of the training set. Out: those to train on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sharpen.errors import DatasetError
from sharpen.types import Task


def range_filter(tasks: Sequence[Task], key: str, low: float | None = None, high: float | None = None) -> list[Task]:
    """Keep tasks whose number in the field `key` is from `low` to `high`, both included; None is no bound. Raises
    `DatasetError` for a task without such a number."""
    kept = []
    for task in tasks:
        value = task.row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise DatasetError(
                f"task {task.id} has {value!r} in {key!r}, where every task needs a number to be filtered by"
            )
        if (low is None or value >= low) and (high is None or value <= high):
            kept.append(task)
    return kept


def difficulty_filter(
    tasks: Sequence[Task], key: str = "difficulty", low: float | None = None, high: float | None = None
) -> list[Task]:
    """Keep tasks whose difficulty, a number in the field `key`, is from `low` to `high`."""
    return range_filter(tasks, key, low, high)


def pass_rate_filter(
    tasks: Sequence[Task], key: str = "pass_rate", low: float | None = None, high: float | None = None
) -> list[Task]:
    """Keep tasks whose pass rate, a number in the field `key`, is from `low` to `high`. Pass rates that the run itself
    measures are those of `sampling.reward_low`, `reward_high` and `sampling.order: difficulty`."""
    return range_filter(tasks, key, low, high)


def random_sample(tasks: Sequence[Task], count: int, seed: int = 0) -> list[Task]:
    """Keep `count` tasks, chosen by `seed`, in their order; all of them where there are no more."""
    chosen = sorted(random.Random(seed).sample(range(len(tasks)), min(count, len(tasks))))
    return [tasks[place] for place in chosen]
