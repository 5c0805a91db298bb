"""In which order tasks are drawn: a sequence for each epoch, with a position that can be saved.

In: number of tasks, seed, batch size. Out: batches of task indices. The order depends on nothing else, so that a
resumed run draws what the interrupted one would have drawn. `difficulty` has an order that depends on rewards too,
`selection` the choice between them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sharpen.errors import ConfigError, DatasetError

Item = TypeVar("Item")


class Order(Protocol):
    """What the coordinator draws tasks from. Tasks are named by their place in the training set."""

    def draw(self, count: int | None = None) -> list[int]:
        """The next `count` tasks (None: a whole batch)."""

    def observe(self, task: int, reward: float) -> None:
        """Take in the mean reward that a drawn task brought."""

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises `ConfigError` if it is of another order."""

    def num_batches(self, epochs: int) -> int:
        """Batches that hold `epochs` times as many tasks as there are, or a little more."""


class TaskOrder:
    """Draws batches of task indices, epoch after epoch.

    Every epoch is a permutation of all tasks: a shuffled one, or always `sequence`. A batch that an epoch's end leaves
    incomplete is completed from the next epoch, with tasks that it does not hold yet (possible whenever it is not
    larger than the number of tasks): so nothing is dropped and nothing repeats within a batch.
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
        assert sequence is None or sorted(sequence) == list(range(num_tasks)), "a sequence holds every task once"
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
        """Batches that draw every task at least `epochs` times."""
        return -(-epochs * self._num_tasks // self._batch_size)

    def draw(self, count: int | None = None) -> list[int]:
        """The next `count` tasks; None draws a batch."""
        count = self._batch_size if count is None else count
        batch: list[int] = []
        while len(batch) < count:
            if self._position == self._num_tasks:
                self._start_epoch(self._epoch + 1, batch, count - len(batch))
            taken = self._order[self._position : self._position + count - len(batch)]
            self._position += len(taken)
            batch.extend(taken)
        return batch

    def observe(self, task: int, reward: float) -> None:
        """Rewards change nothing in this order."""

    def state(self) -> dict[str, Any]:
        """The position, as JSON."""
        return {
            **self._identity,
            "epoch": self._epoch,
            "position": self._position,
            "carried": list(self._carried),
            "needed": self._needed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises `ConfigError` if it is of another order, dataset size, seed or batch size."""
        check_identity(self._identity, state)
        self._start_epoch(int(state["epoch"]), state["carried"], int(state["needed"]))
        self._position = int(state["position"])

    def _start_epoch(self, epoch: int, carried: Sequence[int], needed: int) -> None:
        """`carried`: the tasks of the unfinished batch, which the first `needed` places of this epoch must not
        repeat."""
        order = list(self._sequence)
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        held = set(carried)
        if held:
            head = [task for task in order if task not in held][:needed]
            first = set(head)
            order = head + [task for task in order if task not in first]
        self._epoch = epoch
        self._position = 0
        self._carried = tuple(carried)
        self._needed = needed
        self._order = order


def check_identity(identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a saved state was that of another order."""
    for name, value in identity.items():
        if state.get(name) != value:
            raise ConfigError(
                f"cannot continue: {name} was {state.get(name)!r}, is now {value!r}: use a new run name, or that value"
            )


def hold_out(tasks: Sequence[Item], seed: int, share: float = 0.1, at_most: int = 512) -> tuple[list[Item], list[Item]]:
    """Split tasks into (for training, held out), each in their order; at least one is held out.

    Raises `DatasetError` if there are fewer than two tasks.
    """
    if len(tasks) < 2:
        raise DatasetError(
            "one task cannot be split into training and held-out: pass eval_dataset or set hold_out: false"
        )
    count = min(at_most, max(1, int(len(tasks) * share)))
    held = set(random.Random(f"{seed}/hold-out").sample(range(len(tasks)), count))
    training = [tasks[index] for index in range(len(tasks)) if index not in held]
    return training, [tasks[index] for index in sorted(held)]


def distinct(ids: Sequence[str]) -> list[str]:
    """The same ids, numbered where one comes again, as tasks do in a batch that is larger than the dataset."""
    times: Counter[str] = Counter()
    named = []
    for id_ in ids:
        times[id_] += 1
        named.append(id_ if times[id_] == 1 else f"{id_}#{times[id_]}")
    return named
