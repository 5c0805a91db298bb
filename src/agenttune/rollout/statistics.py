"""What a list of groups says as a whole: rewards, failures by cause, what was excluded, lengths, times.

In: `Group`s. Out: `RolloutStatistics`, its metrics for the monitors, and `RolloutError` when too much was excluded.
Only scored rollouts enter reward figures; excluded ones are counted, for each task, since training only on survivors is
a bias too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from agenttune.errors import RolloutError
from agenttune.rollout.attempt import AUXILIARY, GATEWAY
from agenttune.types import Group, Outcome, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatistics:
    """Figures over groups. Means are NaN where there is nothing to average (rewards, if rollouts need and have none).

    `failures` counts rollouts by outcome after the last attempt, `retries` failed attempts before it; `first_errors`
    has the first error line of each cause. `num_flat_groups` are those with two or more scored rollouts, all of one
    reward: they teach nothing. `excluded_by_task` is the share of a task's rollouts without reward, where not 0.
    `truncated_share` is of the calls that stopped at their token limit. `auxiliary_totals` sums what auxiliary models
    were used for (`auxiliary/<name>/calls`, `…/tokens`) over all attempts, failed ones included.
    """

    num_groups: int
    num_rollouts: int
    num_excluded: int
    num_flat_groups: int
    num_without_calls: int
    reward_mean: float
    reward_std: float
    failures: Mapping[Outcome, int]
    retries: Mapping[Outcome, int]
    first_errors: Mapping[Outcome, str]
    excluded_by_task: Mapping[str, float]
    mean_calls: float
    mean_sampled_tokens: float
    mean_seconds: float
    truncated_share: float
    user_metrics: Mapping[str, float]
    auxiliary_totals: Mapping[str, float] = field(default_factory=dict)

    @property
    def excluded_share(self) -> float:
        """Share of the rollouts that take no part."""
        return self.num_excluded / self.num_rollouts if self.num_rollouts else 0.0

    def metrics(self) -> dict[str, float]:
        """Numbers for the monitors; what has no value is left out. The user's own are under `workflow/`."""
        numbers = {
            "reward/mean": self.reward_mean,
            "reward/std": self.reward_std,
            "reward/flat_groups": float(self.num_flat_groups),
            "rollout/count": float(self.num_rollouts),
            "rollout/excluded_share": self.excluded_share,
            "rollout/tasks_with_exclusions": float(len(self.excluded_by_task)),
            "rollout/worst_task_excluded_share": max(self.excluded_by_task.values(), default=0.0),
            "rollout/without_calls": float(self.num_without_calls),
            "rollout/retries": float(sum(self.retries.values())),
            "rollout/calls": self.mean_calls,
            "rollout/sampled_tokens": self.mean_sampled_tokens,
            "rollout/seconds": self.mean_seconds,
            "rollout/truncated_share": self.truncated_share,
            **{f"rollout/failures/{outcome.value}": float(count) for outcome, count in self.failures.items()},
            **{_namespaced(name): value for name, value in self.user_metrics.items()},
            **{f"{name}_total": value for name, value in self.auxiliary_totals.items()},
        }
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def notes(self, *, needs_reward: bool = True) -> list[str]:
        """What deserves a word beside the step's line of the display: nothing in a good step. Without `needs_reward`
        equal rewards do not matter."""
        found = []
        if needs_reward and self.num_groups and self.num_flat_groups == self.num_groups:
            found.append("every group has one reward: nothing to learn from")
        if self.num_excluded:
            causes = ", ".join(f"{count} {outcome.value}" for outcome, count in self.failures.items())
            found.append(f"{self.num_excluded} of {self.num_rollouts} rollouts excluded ({causes})")
        if self.num_without_calls:
            found.append(f"{self.num_without_calls} rollouts made no model call")
        return found


def summarize(groups: Iterable[Group]) -> RolloutStatistics:
    """Figures over the groups' last attempts (retries are only counted)."""
    groups = tuple(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    attempts = [rollout for group in groups for rollout in group.attempts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    calls = [call for rollout in rollouts for call in rollout.calls]
    failed = [rollout for rollout in rollouts if rollout.outcome != Outcome.OK]
    return RolloutStatistics(
        num_groups=len(groups),
        num_rollouts=len(rollouts),
        num_excluded=sum(not rollout.scored for rollout in rollouts),
        num_flat_groups=sum(is_flat(group) for group in groups),
        num_without_calls=sum(rollout.outcome == Outcome.OK and not rollout.calls for rollout in rollouts),
        reward_mean=_mean(rewards),
        reward_std=pstdev(rewards) if rewards else math.nan,
        failures=Counter(rollout.outcome for rollout in failed),
        retries=Counter(rollout.outcome for rollout in attempts),
        first_errors=_first_errors([*failed, *attempts]),
        excluded_by_task=_excluded_by_task(rollouts),
        mean_calls=_mean([len(rollout.calls) for rollout in rollouts]),
        mean_sampled_tokens=_mean([sum(len(call.sampled_ids_S) for call in rollout.calls) for rollout in rollouts]),
        mean_seconds=_mean([rollout.seconds for rollout in rollouts]),
        truncated_share=_mean([call.finish_reason == "length" for call in calls]),
        user_metrics=_user_metrics(rollouts),
        auxiliary_totals=_auxiliary_totals([*rollouts, *attempts]),
    )


def check_excluded(groups: Iterable[Group], max_excluded_share: float) -> None:
    """Raise `RolloutError`, with the causes and their first errors, if more than this share has no reward."""
    statistics = summarize(groups)
    if statistics.excluded_share <= max_excluded_share:
        return
    lines = [
        f"  {count} x {outcome.value}: {statistics.first_errors.get(outcome, 'no message')}"
        for outcome, count in sorted(statistics.failures.items(), key=lambda item: -item[1])
    ]
    raise RolloutError(
        f"{statistics.num_excluded} of {statistics.num_rollouts} rollouts have no reward "
        f"(rollout.max_excluded_share is {max_excluded_share:g}); by cause, with the first error of each:\n"
        + "\n".join(lines)
    )


def is_flat(group: Group) -> bool:
    """Whether two or more rollouts of a group have rewards, all the same."""
    rewards = [rollout.reward for rollout in group.scored if rollout.reward is not None]
    return len(rewards) > 1 and len(set(rewards)) == 1


def _first_errors(failed: Sequence[Rollout]) -> dict[Outcome, str]:
    first: dict[Outcome, str] = {}
    for rollout in failed:
        if rollout.error is not None:
            first.setdefault(rollout.outcome, rollout.error)
    return first


def _excluded_by_task(rollouts: Sequence[Rollout]) -> dict[str, float]:
    of_task: dict[str, list[bool]] = defaultdict(list)
    for rollout in rollouts:
        of_task[rollout.task_id].append(not rollout.scored)
    return {task_id: fmean(excluded) for task_id, excluded in of_task.items() if any(excluded)}


def _user_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each metric over the rollouts that report it."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            values[name].append(value)
    return {name: fmean(found) for name, found in sorted(values.items())}


def _auxiliary_totals(rollouts: Sequence[Rollout]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            if name.startswith(AUXILIARY):
                totals[name] += value
    return dict(sorted(totals.items()))


def _namespaced(name: str) -> str:
    return name if name.startswith((GATEWAY, AUXILIARY)) else f"workflow/{name}"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
