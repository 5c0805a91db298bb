"""In which order tasks are drawn: a seeded permutation for each epoch, with a position that can be saved.

In: number of tasks, seed, batch size. Out: batches of task indices. The order depends on nothing else, so that a
resumed run draws what the interrupted one would have drawn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agenttune.errors import ConfigError, DatasetError


class TaskOrder:
    """Draws batches of task indices, epoch after epoch.

    Every epoch is a permutation of all tasks. A batch that an epoch's end leaves incomplete is completed from the next
    epoch, with tasks that it does not hold yet (possible whenever `batch_size <= num_tasks`): so nothing is dropped and
    nothing repeats within a batch.
    """

    def __init__(self, num_tasks: int, seed: int, batch_size: int, shuffle: bool = True) -> None:
        if num_tasks < 1 or batch_size < 1:
            raise ConfigError(f"num_tasks ({num_tasks}) and batch_size ({batch_size}) must be at least 1")
        self._identity = {"num_tasks": num_tasks, "seed": seed, "batch_size": batch_size, "shuffle": shuffle}
        self._num_tasks = num_tasks
        self._seed = seed
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._start_epoch(0, ())

    @property
    def epoch(self) -> int:
        """Whole passes over the tasks that are behind us."""
        return self._epoch + self._position // self._num_tasks

    @property
    def num_drawn(self) -> int:
        """Tasks drawn so far, over all epochs."""
        return self._epoch * self._num_tasks + self._position

    def num_batches(self, epochs: int) -> int:
        """Batches that draw every task at least `epochs` times."""
        return -(-epochs * self._num_tasks // self._batch_size)

    def draw(self) -> list[int]:
        """The next batch."""
        batch: list[int] = []
        while len(batch) < self._batch_size:
            if self._position == self._num_tasks:
                self._start_epoch(self._epoch + 1, batch)
            taken = self._order[self._position : self._position + self._batch_size - len(batch)]
            self._position += len(taken)
            batch.extend(taken)
        return batch

    def state(self) -> dict[str, Any]:
        """The position, as JSON."""
        return {**self._identity, "epoch": self._epoch, "position": self._position, "carried": list(self._carried)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises `ConfigError` if it is of another dataset size, seed or batch size."""
        for name, value in self._identity.items():
            if state[name] != value:
                raise ConfigError(
                    f"cannot continue: {name} was {state[name]!r}, is now {value!r}: use a new run name, or that value"
                )
        self._start_epoch(int(state["epoch"]), state["carried"])
        self._position = int(state["position"])

    def _start_epoch(self, epoch: int, carried: Sequence[int]) -> None:
        """`carried`: the tasks of the unfinished batch, which the first places of this epoch must not repeat."""
        order = list(range(self._num_tasks))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        held = set(carried)
        if held:
            needed = (self._batch_size - len(carried)) % self._batch_size
            head = [task for task in order if task not in held][:needed]
            first = set(head)
            order = head + [task for task in order if task not in first]
        self._epoch = epoch
        self._position = 0
        self._carried = tuple(carried)
        self._order = order


def hold_out(num_tasks: int, seed: int, share: float = 0.1, at_most: int = 512) -> tuple[list[int], list[int]]:
    """Split task indices into (for training, held out), each in ascending order; at least one is held out.

    Raises `DatasetError` if there are fewer than two tasks.
    """
    if num_tasks < 2:
        raise DatasetError(
            "one task cannot be split into training and held-out: pass eval_dataset or set hold_out: false"
        )
    count = min(at_most, max(1, int(num_tasks * share)))
    held = sorted(random.Random(f"{seed}/hold-out").sample(range(num_tasks), count))
    chosen = set(held)
    return [index for index in range(num_tasks) if index not in chosen], held
