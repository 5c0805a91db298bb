"""The order in which tasks are drawn: a sequence for each epoch, with a position that can be saved.

In: number of tasks, seed, batch size. Out: batches of task indices. The order depends on nothing else, so that a
resumed run draws what the interrupted one would have drawn. `difficulty` has an order that also depends on rewards;
`selection` chooses between them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sharpen.errors import ConfigError

Item = TypeVar("Item")


class Order(Protocol):
    """Draws tasks for the coordinator. Tasks are indices into the training set."""

    def draw(self, count: int | None = None) -> list[int]:
        """Draw the next `count` tasks (None: a batch)."""

    def observe(self, task: int, reward: float) -> None:
        """Record the mean reward of a drawn task."""

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises `ConfigError` if it belongs to another order."""

    def num_batches(self, epochs: int) -> int:
        """Return the number of batches for `epochs` times the number of tasks, rounded up."""


class TaskOrder:
    """Draws batches of task indices, epoch after epoch.

    Every epoch is a permutation of all tasks: a shuffled one, or always `sequence`. If an epoch ends within a batch,
    the batch is completed from the next epoch with tasks that it does not contain yet (possible unless it is larger
    than the number of tasks). So no task is dropped, and none repeats within a batch.
    """

    def __init__(
        self,
        num_tasks: int,
        seed: int,
        batch_size: int,
        shuffle: bool = True,
        *,
        sequence: Sequence[int] | None = None,
        name: str = "shuffled",
    ) -> None:
        if num_tasks < 1 or batch_size < 1:
            raise ConfigError(f"num_tasks ({num_tasks}) and batch_size ({batch_size}) must be at least 1")
        assert sequence is None or sorted(sequence) == list(range(num_tasks)), "`sequence` must have every task once"
        self._identity = {
            "order": name,
            "num_tasks": num_tasks,
            "seed": seed,
            "batch_size": batch_size,
            "shuffle": shuffle,
        }
        self._sequence = list(range(num_tasks)) if sequence is None else list(sequence)
        self._num_tasks = num_tasks
        self._seed = seed
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._start_epoch(0, (), 0)

    def num_batches(self, epochs: int) -> int:
        """Return the number of batches that draw every task at least `epochs` times."""
        return -(-epochs * self._num_tasks // self._batch_size)

    def draw(self, count: int | None = None) -> list[int]:
        """Draw the next `count` tasks (None: a batch)."""
        count = self._batch_size if count is None else count
        batch: list[int] = []
        while len(batch) < count:
            if self._position == self._num_tasks:
                self._start_epoch(self._epoch + 1, batch, count - len(batch))
            tasks = self._order[self._position : self._position + count - len(batch)]
            self._position += len(tasks)
            batch.extend(tasks)
        return batch

    def observe(self, task: int, reward: float) -> None:
        """Do nothing: this order does not depend on rewards."""

    def state(self) -> dict[str, Any]:
        """Return the position, as JSON."""
        return {
            **self._identity,
            "epoch": self._epoch,
            "position": self._position,
            "carried": list(self._carried),
            "needed": self._needed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises `ConfigError` if order, dataset size, seed or batch size differ."""
        check_identity(self._identity, state)
        self._start_epoch(int(state["epoch"]), state["carried"], int(state["needed"]))
        self._position = int(state["position"])

    def _start_epoch(self, epoch: int, carried: Sequence[int], needed: int) -> None:
        """Start an epoch whose first `needed` tasks complete the unfinished batch `carried` without repeating it."""
        order = list(self._sequence)
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        excluded = set(carried)
        if excluded:
            head = [task for task in order if task not in excluded][:needed]
            first = set(head)
            order = head + [task for task in order if task not in first]
        self._epoch = epoch
        self._position = 0
        self._carried = tuple(carried)
        self._needed = needed
        self._order = order


def check_identity(identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a saved state belongs to another order."""
    for name, value in identity.items():
        if state.get(name) != value:
            raise ConfigError(
                f"cannot continue: {name} was {state.get(name)!r}, is now {value!r}: use a new run name, or that value"
            )


LEAST_TO_SPLIT = 3
"""Tasks of the smallest dataset of which one is held out."""


def hold_out(tasks: Sequence[Item], seed: int, share: float = 0.1, at_most: int = 512) -> tuple[list[Item], list[Item]]:
    """Split tasks into training and held-out ones, each in their order. At least one is held out, unless there are
    fewer than `LEAST_TO_SPLIT`: those all train."""
    if len(tasks) < LEAST_TO_SPLIT:
        return [*tasks], []
    count = min(at_most, max(1, int(len(tasks) * share)))
    held = set(random.Random(f"{seed}/hold-out").sample(range(len(tasks)), count))
    training = [tasks[index] for index in range(len(tasks)) if index not in held]
    return training, [tasks[index] for index in sorted(held)]


def distinct(ids: Sequence[str]) -> list[str]:
    """Return the ids with a number added to repeated ones: a batch larger than the dataset repeats tasks."""
    times: Counter[str] = Counter()
    numbered = []
    for id_ in ids:
        times[id_] += 1
        numbered.append(id_ if times[id_] == 1 else f"{id_}#{times[id_]}")
    return numbered
