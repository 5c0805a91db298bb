"""Makes the order that the settings choose.

In: the training tasks and the settings of `sampling`. Out: an `Order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sharpen.agent.tasks.difficulty import DifficultyOrder, DifficultySettings
from sharpen.agent.tasks.order import Order, TaskOrder
from sharpen.errors import DatasetError
from sharpen.types import Task


class OrderSettings(DifficultySettings, Protocol):
    """The settings of `sampling` that are read here."""

    @property
    def order(self) -> str: ...
    @property
    def curriculum_key(self) -> str | None: ...


def make_order(tasks: Sequence[Task], sampling: OrderSettings, *, seed: int, batch_size: int) -> Order:
    """Return the configured order of `tasks`. Raises `DatasetError` if a task lacks the number for a curriculum."""
    if sampling.order == "difficulty":
        return DifficultyOrder(len(tasks), seed, batch_size, sampling)
    if sampling.order == "curriculum" and sampling.curriculum_key is not None:
        sequence = easy_to_hard(tasks, sampling.curriculum_key)
        name = f"curriculum by {sampling.curriculum_key}"
        return TaskOrder(len(tasks), seed, batch_size, shuffle=False, sequence=sequence, name=name)
    if sampling.order == "sequential":
        return TaskOrder(len(tasks), seed, batch_size, shuffle=False, name="sequential")
    return TaskOrder(len(tasks), seed, batch_size)


def easy_to_hard(tasks: Sequence[Task], key: str) -> list[int]:
    """Return the task indices sorted by the number in the tasks' field `key`, ascending; descending if `key` begins
    with `-`. The sort is stable.

    Raises `DatasetError` for a task without such a number.
    """
    sign, field = (-1, key[1:]) if key.startswith("-") else (1, key)
    for task in tasks:
        value = task.row.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise DatasetError(
                f"sampling.curriculum_key is {key!r}, but task {task.id} has {value!r} there: every task needs a number"
            )
    return sorted(range(len(tasks)), key=lambda place: sign * tasks[place].row[field])
