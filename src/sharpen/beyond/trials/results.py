"""Results of candidates on tasks, and how failures count.

In: groups of one rollout. Out: a `Result` for each task and a `Measured` for each candidate, with comparable rewards.

A failure of the agent (the workflow raised after its model may have answered, the time limit, an unusable answer)
counts as much as the worst reward of any candidate on any task, and never more than 0, so that no candidate gains by
failing. A failure of something else (a server, the judge) is retried, then left out of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.agent.rollout.attempt import JUDGE
from sharpen.agent.rollout.in_process import OpenModels
from sharpen.agent.rollout.models import RolloutModels
from sharpen.agent.rollout.retries import fails_its_task
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.beyond.trials.agent import Trial
from sharpen.types import Rollout, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one candidate on one task. If `reward` is None, the agent `failed`, or else the task is left out;
    `error` says why. `trial` is the last attempt, None if none began."""

    task: Task
    reward: float | None
    failed: bool
    error: str
    metrics: Mapping[str, float]
    trial: Trial | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of one candidate, by task id."""

    results: Mapping[str, Result]

    @property
    def failed(self) -> list[Result]:
        """The tasks on which the agent failed."""
        return [result for result in self.results.values() if result.reward is None and result.failed]

    @property
    def left_out(self) -> list[Result]:
        """The tasks that something else made fail."""
        return [result for result in self.results.values() if result.reward is None and not result.failed]

    @property
    def given(self) -> list[float]:
        """The rewards of the tasks that have one."""
        return [result.reward for result in self.results.values() if result.reward is not None]

    def rewards(self, floor: float) -> dict[str, float]:
        """Return the reward by task id. Failures count `floor`; tasks that are left out are missing."""
        return {
            id_: floor if result.reward is None else result.reward
            for id_, result in self.results.items()
            if result.reward is not None or result.failed
        }

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric of the judge over the tasks that have it."""
        found: dict[str, list[float]] = {}
        for result in self.results.values():
            for name, value in result.metrics.items():
                if result.reward is not None and name.startswith(JUDGE):
                    found.setdefault(name.removeprefix(JUDGE), []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def lines(self, floor: float) -> list[str]:
        """Return text that says how many tasks failed or were left out, with the first cause."""
        total = len(self.results)
        lines = []
        if failed := self.failed:
            lines.append(
                f"{len(failed)} of {total} tasks failed and count {floor:g}, the worst result; the first: "
                f"{failed[0].task.id}: {failed[0].error}"
            )
        if left_out := self.left_out:
            lines.append(
                f"{len(left_out)} of {total} tasks are left out; the first: {left_out[0].task.id}: {left_out[0].error}"
            )
        return lines


def floor_of(measured: Iterable[Measured]) -> float:
    """Return the reward that a failure counts: the lowest reward, at most 0."""
    return min([0.0, *(reward for one in measured for reward in one.given)])


class Pending:
    """An attempt of one candidate on one task, in progress."""

    def __init__(self, runner: RolloutRunner, task: Task, opens: OpenModels) -> None:
        self._task = task
        self._trials: list[Trial] = []

        def opened(rollout_id: str, noise_seed: int) -> RolloutModels:
            models = opens(rollout_id, noise_seed)
            self._trials.append(models.model)
            return models

        # The same noise for every candidate makes the comparison sharper.
        self.group = runner.submit(task, f"trial/{task.id}", 0, 1, open_session=opened, evaluation=True)

    def result(self) -> Result:
        """Wait for the result. Raises `ConfigError` or `DatasetError` for bad input."""
        (rollout,) = self.group.result().rollouts
        return Result(
            task=self._task,
            reward=rollout.reward,
            failed=fails_its_task(rollout),
            error=_why(rollout),
            metrics=rollout.metrics,
            trial=self._trials[-1] if self._trials else None,
        )


def measure(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    opens: OpenModels,
    on_result: Callable[[Any], None] | None = None,
) -> Measured:
    """Run a candidate on all tasks and wait. `on_result` is called on another thread, once for each task."""
    pending = [Pending(runner, task, opens) for task in tasks]
    if on_result is not None:
        for one in pending:
            one.group.add_done_callback(on_result)
    runner.collect([one.group for one in pending])
    return Measured(results={task.id: one.result() for task, one in zip(tasks, pending, strict=True)})


def _why(rollout: Rollout) -> str:
    return "" if rollout.error is None else f"{rollout.outcome.value}: {rollout.error}"
