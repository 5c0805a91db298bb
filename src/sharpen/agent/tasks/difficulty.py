"""An order that prefers tasks whose recent mean reward is near a target.

In: number of tasks, seed, batch size, the rewards of drawn tasks. Out: batches of task indices, and a state that can be
saved. With the same seed and rewards it always draws the same tasks.

Shape suffixes: N tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sharpen.agent.tasks.order import check_identity
from sharpen.errors import ConfigError

RATE = 0.5
"""The weight of a task's newest mean reward in its moving average."""


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
    """

    def __init__(self, num_tasks: int, seed: int, batch_size: int, settings: DifficultySettings) -> None:
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
        self._means: dict[int, float] = {}

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
        before = self._means.get(task, reward)
        self._means[task] = before + RATE * (reward - before)

    def weights(self) -> npt.NDArray[np.float64]:
        """Return the weight of each task, shape N."""
        weights_N = np.ones(self._identity["num_tasks"])
        if self._means:
            means = np.array(list(self._means.values()))
            distances = (means - self._settings.difficulty_target) / self._settings.difficulty_width
            near = np.maximum(np.exp(-0.5 * np.square(distances)), self._settings.difficulty_floor)
            weights_N[list(self._means)] = near
        return weights_N

    def state(self) -> dict[str, Any]:
        """Return the number of draws and the recent mean rewards, as JSON."""
        return {
            **self._identity,
            "num_draws": self._num_draws,
            "means": [[task, mean] for task, mean in sorted(self._means.items())],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises `ConfigError` if order, dataset size, seed or batch size differ."""
        check_identity(self._identity, state)
        self._num_draws = int(state["num_draws"])
        self._means = {int(task): float(mean) for task, mean in state["means"]}

    def _ranking(self) -> npt.NDArray[np.int64]:
        """Return all tasks in the order of a weighted draw without replacement, shape N. Its first k are a draw of k.

        Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
        """
        uniform_N = np.random.default_rng([self._identity["seed"], self._num_draws]).random(self._identity["num_tasks"])
        self._num_draws += 1
        return np.argsort(np.log1p(-uniform_N) / -self.weights(), kind="stable")
