"""Statistics over groups: rewards, failures by cause, exclusions, lengths, times.

In: `Group`s. Out: `RolloutStatistics`, its metrics for the monitors, and `RolloutError` if too much was excluded. Only
scored rollouts enter reward figures; excluded ones are counted for each task, since training only on survivors is a
bias too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

from sharpen.agent.rollout.attempt import JUDGE, WORKFLOW
from sharpen.agent.rollout.models import AUXILIARY, GATEWAY
from sharpen.agent.rollout.retries import replacements
from sharpen.errors import RolloutError
from sharpen.types import Group, Outcome, Rollout

USER_PREFIXES = (JUDGE, WORKFLOW)
"""Prefixes of the metrics that workflow and judge returned."""
QUICK = 0.1
"""If rollouts without calls take at most this share of the time of the others, a cache probably answered."""
CACHED = (
    "the agent's framework answers from a cache; switch it off (DSPy: dspy.configure_cache(enable_disk_cache=False, "
    "enable_memory_cache=False); LangChain: set_llm_cache(None))"
)
SAME = 1e-9
"""Rewards whose range is at most this share of the largest one (of 1, if that is larger) are equal: what sums of parts
leave behind teaches nothing."""
NAME_IT = "if the model's answer caused it, name it in rollout.model_exceptions, or raise UnusableAnswerError"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatistics:
    """Figures over groups. Means are NaN if there is nothing to average.

    `failures` counts rollouts by the outcome of the last attempt, `retries` the failed attempts before it;
    `first_errors` has the first error line of each cause. `replaced` counts rollouts to which a retry gave other
    answers, by the outcome of the replaced attempt. `scored_failures` counts failed rollouts that got the failure
    reward. `num_flat_groups` counts groups with two or more rewards, all equal, which teach nothing;
    `num_spread_groups` those whose rewards differ. Groups with fewer rewards are neither; rewards of rollouts without
    an answer of the model do not count here.
    `num_without_calls` counts rollouts that ended OK without an answer of the model; `seconds_without_calls` and
    `seconds_with_calls` are the median durations of these and of the others. `excluded_by_task` and `replaced_by_task`
    are the shares of a task's rollouts that were excluded or replaced, if not 0. `truncated_share` is the share of
    calls that stopped at their token limit. `auxiliary_totals` sums the use of auxiliary models
    (`auxiliary/<name>/calls`, `…/tokens`) over all attempts, including failed ones.
    """

    num_groups: int
    num_rollouts: int
    num_excluded: int
    num_flat_groups: int
    num_spread_groups: int
    num_without_calls: int
    seconds_without_calls: float
    seconds_with_calls: float
    reward_mean: float
    reward_std: float
    failures: Mapping[Outcome, int]
    retries: Mapping[Outcome, int]
    replaced: Mapping[Outcome, int]
    scored_failures: Mapping[Outcome, int]
    first_errors: Mapping[Outcome, str]
    excluded_by_task: Mapping[str, float]
    replaced_by_task: Mapping[str, float]
    mean_calls: float
    mean_sampled_tokens: float
    mean_seconds: float
    truncated_share: float
    user_metrics: Mapping[str, float]
    auxiliary_totals: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def excluded_share(self) -> float:
        """Share of the rollouts that do not take part."""
        return self.num_excluded / self.num_rollouts if self.num_rollouts else 0.0

    @property
    def num_replaced(self) -> int:
        """How many rollouts a retry gave other answers."""
        return sum(self.replaced.values())

    @property
    def replaced_share(self) -> float:
        """Share of the rollouts that a retry gave other answers."""
        return self.num_replaced / self.num_rollouts if self.num_rollouts else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the numbers for the monitors, without those that are not finite. The user's own metrics are under
        `workflow/` and `judge/`."""
        numbers = {
            "reward/mean": self.reward_mean,
            "reward/std": self.reward_std,
            "reward/flat_groups": float(self.num_flat_groups),
            "rollout/count": float(self.num_rollouts),
            "rollout/excluded_share": self.excluded_share,
            "rollout/tasks_with_exclusions": float(len(self.excluded_by_task)),
            "rollout/worst_task_excluded_share": max(self.excluded_by_task.values(), default=0.0),
            "rollout/replaced_share": self.replaced_share,
            "rollout/worst_task_replaced_share": max(self.replaced_by_task.values(), default=0.0),
            "rollout/without_calls": float(self.num_without_calls),
            **({"rollout/dropped": float(sum(self.dropped.values()))} if self.dropped else {}),
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
        """Return remarks to display with the step; empty for a good step. Without `needs_reward`, equal rewards are not
        remarked on."""
        notes = []
        if needs_reward and self.num_groups and self.num_flat_groups == self.num_groups:
            notes.append("rewards are equal within every group: nothing to learn from")
        if self.num_excluded:
            excluded = Counter(self.failures) - Counter(self.scored_failures)
            notes.append(f"{self.num_excluded} of {self.num_rollouts} rollouts excluded ({_counts_text(excluded)})")
        if self.dropped:
            reasons = ", ".join(f"{count} {reason.partition(': ')[2]}" for reason, count in self.dropped.items())
            notes.append(
                f"{sum(self.dropped.values())} of {self.num_rollouts} rollouts dropped by operators ({reasons})"
            )
        if self.scored_failures:
            number, causes = sum(self.scored_failures.values()), _counts_text(self.scored_failures)
            notes.append(
                f"{number} of {self.num_rollouts} rollouts got failure_reward for the model's failure ({causes})"
            )
        if self.num_replaced:
            notes.append(replaced_note(self))
        if self.num_without_calls:
            notes.append(without_calls_note(self, "they teach nothing"))
        if hint := self._hint():
            notes.append(hint)
        return notes

    def _hint(self) -> str:
        """Return what to do if the model's answers may have caused the workflow's exceptions; else empty."""
        if not (self.failures.get(Outcome.WORKFLOW_ERROR) or self.replaced.get(Outcome.WORKFLOW_ERROR)):
            return ""
        first = self.first_errors.get(Outcome.WORKFLOW_ERROR, "no message")
        return f"{first}: {NAME_IT}"


def summarize(groups: Iterable[Group]) -> RolloutStatistics:
    """Return the statistics of the groups' last attempts. Earlier attempts are only counted. Groups at the side of
    others have no part in the figures of rewards."""
    groups = tuple(groups)
    of_tasks = [group for group in groups if group.beside is None]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    attempts = [rollout for group in groups for rollout in group.attempts]
    rewards = [one.reward for group in of_tasks for one in group.rollouts if one.reward is not None]
    calls = [call for rollout in rollouts for call in rollout.calls]
    failed = [rollout for rollout in rollouts if rollout.outcome not in (Outcome.OK, Outcome.FILTERED)]
    excluded = [rollout for rollout in rollouts if not rollout.scored and rollout.outcome != Outcome.FILTERED]
    silent = [rollout for rollout in rollouts if rollout.outcome == Outcome.OK and rollout.num_answers == 0]
    chosen = [failed for group in groups for failed, _ in replacements(group)]
    return RolloutStatistics(
        num_groups=len(of_tasks),
        num_rollouts=len(rollouts),
        num_excluded=len(excluded),
        dropped=Counter(rollout.error or "" for rollout in rollouts if rollout.outcome == Outcome.FILTERED),
        num_flat_groups=sum(is_flat(group) for group in of_tasks),
        num_spread_groups=sum(differ(answered_rewards(group)) for group in of_tasks),
        num_without_calls=len(silent),
        seconds_without_calls=_median([rollout.seconds for rollout in silent]),
        seconds_with_calls=_median([rollout.seconds for rollout in rollouts if rollout.num_answers]),
        reward_mean=_mean(rewards),
        reward_std=pstdev(rewards) if rewards else math.nan,
        failures=Counter(rollout.outcome for rollout in failed),
        retries=Counter(rollout.outcome for rollout in attempts),
        replaced=Counter(rollout.outcome for rollout in chosen),
        scored_failures=Counter(rollout.outcome for rollout in failed if rollout.scored),
        first_errors=_first_errors([*failed, *attempts]),
        excluded_by_task=_shares_by_task(rollouts, excluded),
        replaced_by_task=_shares_by_task(rollouts, chosen),
        mean_calls=_mean([len(rollout.calls) for rollout in rollouts]),
        mean_sampled_tokens=_mean([sum(len(call.sampled_ids_S) for call in rollout.calls) for rollout in rollouts]),
        mean_seconds=_mean([rollout.seconds for rollout in rollouts]),
        truncated_share=_mean([call.finish_reason == "length" for call in calls]),
        user_metrics=_mean_metrics(rollouts),
        auxiliary_totals=_auxiliary_totals([*rollouts, *attempts]),
    )


def check_excluded(groups: Iterable[Group], max_excluded_share: float) -> None:
    """Raise `RolloutError`, with the causes and their first errors, if more than this share of the rollouts was
    excluded, or replaced by a retry with other answers."""
    statistics = summarize(groups)
    if statistics.excluded_share + statistics.replaced_share <= max_excluded_share:
        return
    causes = Counter(statistics.failures) + Counter(statistics.replaced)
    lines = [
        f"  {count} x {outcome.value}: {statistics.first_errors.get(outcome, 'no message')}"
        for outcome, count in sorted(causes.items(), key=lambda item: -item[1])
    ]
    also = f", and {statistics.num_replaced} were replaced by a retry that gave other answers"
    raise RolloutError(
        f"{statistics.num_excluded} of {statistics.num_rollouts} rollouts have no reward"
        f"{also if statistics.num_replaced else ''} "
        f"(rollout.max_excluded_share is {max_excluded_share:g}); by cause, with the first error of each:\n"
        + "\n".join(lines)
        + (f"\n{NAME_IT}" if {Outcome.WORKFLOW_ERROR, Outcome.JUDGE_ERROR} & set(causes) else "")
    )


def replaced_note(found: RolloutStatistics) -> str:
    """Return how many rollouts a retry gave other answers, by the outcome of the failed attempt, as text."""
    return (
        f"{found.num_replaced} of {found.num_rollouts} rollouts replaced by a retry that gave other answers "
        f"({_counts_text(found.replaced)})"
    )


def without_calls_note(found: RolloutStatistics, otherwise: str) -> str:
    """Return a message about rollouts that ended OK without an answer of the model.

    If they took almost no time, a cache is named as the cause; else the message ends with `otherwise`.
    """
    text = f"{found.num_without_calls} of {found.num_rollouts} rollouts made no model call"
    if not found.seconds_without_calls <= QUICK * found.seconds_with_calls:
        return f"{text}: {otherwise}"
    return (
        f"{text}, and took {found.seconds_without_calls:.3f} s where the others took {found.seconds_with_calls:.2f} s: "
        f"{CACHED}"
    )


def is_flat(group: Group) -> bool:
    """Whether a group has two or more rewards of rollouts in which the model answered, and all are equal."""
    rewards = answered_rewards(group)
    return len(rewards) > 1 and not differ(rewards)


def answered_rewards(group: Group) -> list[float]:
    """Return the rewards that say something about the model: those of rollouts that it answered."""
    return [rollout.reward for rollout in group.scored if rollout.answered and rollout.reward is not None]


def differ(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than rounding (`SAME`)."""
    if len(rewards) < 2:
        return False
    least, most = min(rewards), max(rewards)
    return most - least > SAME * max(1.0, abs(least), abs(most))


def _first_errors(failed: Sequence[Rollout]) -> dict[Outcome, str]:
    first: dict[Outcome, str] = {}
    for rollout in failed:
        if rollout.error is not None:
            first.setdefault(rollout.outcome, rollout.error)
    return first


def _shares_by_task(rollouts: Sequence[Rollout], subset: Sequence[Rollout]) -> dict[str, float]:
    """Return the share of each task's rollouts that are in `subset`, for tasks that have any."""
    totals = Counter(rollout.task_id for rollout in rollouts)
    return {task_id: count / totals[task_id] for task_id, count in Counter(one.task_id for one in subset).items()}


def _counts_text(outcomes: Mapping[Outcome, int]) -> str:
    return ", ".join(f"{count} {outcome.value}" for outcome, count in outcomes.items())


def _mean_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each metric over the rollouts that report it."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            values[name].append(value)
    return {name: fmean(numbers) for name, numbers in sorted(values.items())}


def _auxiliary_totals(rollouts: Sequence[Rollout]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            if name.startswith(AUXILIARY):
                totals[name] += value
    return dict(sorted(totals.items()))


def _namespaced(name: str) -> str:
    return name if name.startswith((GATEWAY, AUXILIARY, JUDGE, WORKFLOW)) else f"{WORKFLOW}{name}"


def own_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a rollout that workflow and judge returned, with their prefix."""
    own = {name: value for name, value in metrics.items() if not name.startswith((GATEWAY, AUXILIARY))}
    return dict(sorted((_namespaced(name), value) for name, value in own.items()))


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
