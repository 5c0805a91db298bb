"""Orders candidates by mean reward, with intervals.

In: the results of each candidate on the same tasks. Out: a `Ranking`. Means are over the tasks that all eligible
candidates have in common; differences are paired by task.
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
from sharpen.beyond.trials.models import Trial
from sharpen.errors import RolloutError
from sharpen.show.monitor.figures import number, signed, with_interval
from sharpen.show.monitor.statistics import Difference, accuracy, paired_difference
from sharpen.types import Rollout, Task

# Results of candidates on tasks, and how failures count.
#
# In: groups of one rollout. Out: a `Result` for each task and a `Measured` for each candidate, with comparable rewards.
#
# A failure of the agent (the workflow raised after its model may have answered, the time limit, an unusable answer)
# counts as much as the worst reward of any candidate on any task, and never more than 0, so that no candidate gains by
# failing. A failure of something else (a server, the judge) is retried, then left out of the comparison.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate: its position in the list, its name, its results."""

    position: int
    name: str
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The eligible candidates, best first, and their rewards by position and task id. `excluded` are the others; a
    failure counts `floor`."""

    ordered: Sequence[Candidate]
    rewards: Mapping[int, Mapping[str, float]]
    excluded: Sequence[Candidate]
    floor: float

    @property
    def best(self) -> Candidate:
        """The candidate with the highest mean reward."""
        return self.ordered[0]

    def mean(self, one: Candidate) -> float:
        """Return a candidate's mean reward."""
        return accuracy(self.rewards[one.position].values()).accuracy

    def difference(self, other: Candidate) -> Difference:
        """Return how much better the best candidate is than another. The intervals are widened so that all hold at
        once."""
        looks = max(1, len(self.ordered) - 1)
        return paired_difference(self.rewards[other.position], self.rewards[self.best.position], looks)

    def lines(self) -> list[str]:
        """Return text: each candidate with its interval, then the best one against every other."""
        lines = []
        among = {reward for rewards in self.rewards.values() for reward in rewards.values()}
        for one in self.ordered:
            mean = accuracy(self.rewards[one.position].values(), among=among)
            lines.append(f"{one.name}: reward {with_interval(mean)}")
            lines += [f"  {name}: {number(value)}" for name, value in one.measured.metrics().items()]
            lines += [f"  {line}" for line in one.measured.lines(self.floor)]
        for one in self.excluded:
            lines.append(f"{one.name}: cannot be chosen")
            lines += [f"  {line}" for line in one.measured.lines(self.floor)]
        lines.append(f"best: {self.best.name} ({len(self.rewards[self.best.position])} tasks)")
        for one in self.ordered[1:]:
            found = self.difference(one)
            shown = "better than" if found.low > 0 else "not shown to be better than"
            lines.append(f"  {shown} {one.name}: {signed(found)}")
        return lines


def rank(candidates: Sequence[Candidate], max_excluded_share: float) -> Ranking:
    """Order candidates by mean reward; the earlier of equal ones comes first.

    A candidate is not eligible if no task has a reward, or if more than `max_excluded_share` of its tasks are left out.
    Raises `RolloutError` if none is eligible, or if they have no task in common.
    """
    can = [
        one
        for one in candidates
        if one.measured.given and len(one.measured.left_out) <= max_excluded_share * len(one.measured.results)
    ]
    floor = floor_of(one.measured for one in can)
    all_rewards = {one.position: one.measured.rewards(floor) for one in can}
    common = set.intersection(*map(set, all_rewards.values())) if all_rewards else set()
    if not common:
        first = next((line for one in candidates for line in one.measured.lines(floor)), "no task was tried")
        raise RolloutError(f"nothing can be chosen: none finished enough of the tasks; {candidates[0].name}: {first}")
    rewards = {
        position: {task: value for task, value in found.items() if task in common}
        for position, found in all_rewards.items()
    }
    ordered = sorted(can, key=lambda one: -accuracy(rewards[one.position].values()).accuracy)
    excluded = [one for one in candidates if one not in can]
    return Ranking(ordered=ordered, rewards=rewards, excluded=excluded, floor=floor)
