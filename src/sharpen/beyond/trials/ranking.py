"""Orders candidates by mean reward, with intervals.

In: the results of each candidate on the same tasks. Out: a `Ranking`. Means are over the tasks that all eligible
candidates have in common; differences are paired by task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sharpen.beyond.trials.results import Measured, floor_of
from sharpen.errors import RolloutError
from sharpen.show.monitor.figures import number, signed, with_interval
from sharpen.show.monitor.statistics import Difference, accuracy, paired_difference


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
