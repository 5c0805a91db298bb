"""The order in which tasks are drawn: a sequence for each epoch, with a position that can be saved.

In: number of tasks, seed, batch size. Out: batches of task indices. The order depends on nothing else, so that a
resumed run draws what the interrupted one would have drawn. Another order also depends on rewards.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sharpen.errors import ConfigError, DatasetError
from sharpen.types import Task

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


# An order that prefers tasks whose recent mean reward is near a target.
#
# In: number of tasks, seed, batch size, the rewards of drawn tasks. Out: batches of task indices, and a state that can
# be saved. With the same seed and rewards it always draws the same tasks.
#
# Shape suffixes: N tasks.

RATE, SHARED_RATE = 0.5, 0.05
"""The weight of the newest mean reward in a task's moving average, and in one that tasks share: there the first ones
count alike, until each has so little weight."""


class DifficultySettings(Protocol):
    """The settings of `sampling` that are read here."""

    @property
    def difficulty_target(self) -> float: ...
    @property
    def difficulty_width(self) -> float: ...
    @property
    def difficulty_floor(self) -> float: ...


class DifficultyOrder:
    """Draws tasks at random without replacement, each with a weight.

    A task that was never drawn has weight 1; one with recent mean reward m has `exp(-((m - target) / width)^2 / 2)`,
    but at least `difficulty_floor`, so that no task is dropped. The recent mean is a moving average with rate `RATE`.
    With `shared`, a value for each task, tasks with the same value have one mean together, also those not drawn yet.
    """

    def __init__(
        self,
        num_tasks: int,
        seed: int,
        batch_size: int,
        settings: DifficultySettings,
        *,
        shared: Sequence[Hashable] | None = None,
    ) -> None:
        if num_tasks < 1 or batch_size < 1:
            raise ConfigError(f"num_tasks ({num_tasks}) and batch_size ({batch_size}) must be at least 1")
        self._identity: dict[str, Any] = {
            "order": "difficulty",
            "num_tasks": num_tasks,
            "seed": seed,
            "batch_size": batch_size,
        }
        self._settings = settings
        self._num_draws = 0
        self._shared = shared is not None
        numbers: dict[Hashable, int] = {}
        values = range(num_tasks) if shared is None else shared
        self._mean_of_N = np.array([numbers.setdefault(value, len(numbers)) for value in values])
        self._means: dict[int, float] = {}
        self._counts: Counter[int] = Counter()

    def num_batches(self, epochs: int) -> int:
        """Return the number of batches for `epochs` times the number of tasks, rounded up."""
        return -(-epochs * int(self._identity["num_tasks"]) // int(self._identity["batch_size"]))

    def draw(self, count: int | None = None) -> list[int]:
        """Draw the next `count` tasks (None: a batch), without repetition unless `count` exceeds the dataset."""
        count = self._identity["batch_size"] if count is None else count
        drawn: list[int] = []
        while len(drawn) < count:
            drawn += self._ranking()[: count - len(drawn)].tolist()
        return drawn

    def observe(self, task: int, reward: float) -> None:
        """Move the task's recent mean reward towards `reward`."""
        mean = int(self._mean_of_N[task])
        self._counts[mean] += 1
        before = self._means.get(mean, reward)
        rate = max(SHARED_RATE, 1 / self._counts[mean]) if self._shared else RATE
        self._means[mean] = before + rate * (reward - before)

    def weights(self) -> npt.NDArray[np.float64]:
        """Return the weight of each task, shape N."""
        weights = np.ones(int(self._mean_of_N.max()) + 1)
        if self._means:
            means = np.array(list(self._means.values()))
            distances = (means - self._settings.difficulty_target) / self._settings.difficulty_width
            near = np.maximum(np.exp(-0.5 * np.square(distances)), self._settings.difficulty_floor)
            weights[list(self._means)] = near
        weights_N: npt.NDArray[np.float64] = weights[self._mean_of_N]
        return weights_N

    def state(self) -> dict[str, Any]:
        """Return the number of draws and the recent mean rewards, as JSON."""
        return {
            **self._identity,
            "num_draws": self._num_draws,
            "means": [[task, mean] for task, mean in sorted(self._means.items())],
            **({"counts": sorted(self._counts.items())} if self._shared else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises `ConfigError` if order, dataset size, seed or batch size differ."""
        check_identity(self._identity, state)
        self._num_draws = int(state["num_draws"])
        self._means = {int(task): float(mean) for task, mean in state["means"]}
        self._counts = Counter({int(mean): int(count) for mean, count in state.get("counts", ())})

    def _ranking(self) -> npt.NDArray[np.int64]:
        """Return all tasks in the order of a weighted draw without replacement, shape N. Its first k are a draw of k.

        Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
        """
        uniform_N = np.random.default_rng([self._identity["seed"], self._num_draws]).random(self._identity["num_tasks"])
        self._num_draws += 1
        return np.argsort(np.log1p(-uniform_N) / -self.weights(), kind="stable")


# Makes the order that the settings choose.
#
# In: the training tasks and the settings of `sampling`. Out: an `Order`.


class OrderSettings(DifficultySettings, Protocol):
    """The settings of `sampling` that are read here."""

    @property
    def order(self) -> str: ...
    @property
    def curriculum_key(self) -> str | None: ...
    @property
    def difficulty_key(self) -> str | None: ...


def make_order(tasks: Sequence[Task], sampling: OrderSettings, *, seed: int, batch_size: int) -> Order:
    """Return the configured order of `tasks`. Raises `DatasetError` if a task lacks the field that it goes by."""
    if sampling.order == "difficulty":
        key = sampling.difficulty_key
        shared = None if key is None else [_value(task, key) for task in tasks]
        return DifficultyOrder(len(tasks), seed, batch_size, sampling, shared=shared)
    if sampling.order == "curriculum" and sampling.curriculum_key is not None:
        sequence = easy_to_hard(tasks, sampling.curriculum_key)
        name = f"curriculum by {sampling.curriculum_key}"
        return TaskOrder(len(tasks), seed, batch_size, shuffle=False, sequence=sequence, name=name)
    if sampling.order == "sequential":
        return TaskOrder(len(tasks), seed, batch_size, shuffle=False, name="sequential")
    return TaskOrder(len(tasks), seed, batch_size)


def _value(task: Task, key: str) -> str:
    if key not in task.row:
        raise DatasetError(
            f"sampling.difficulty_key is {key!r}, but task {task.id} has no such field (it has {', '.join(task.row)})"
        )
    return str(task.row[key])


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
