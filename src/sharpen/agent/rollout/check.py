"""The pre-flight check: finds out whether a run can learn anything, before the cost of training.

In: the groups of a few tasks. Out: a `CheckReport` that says 'ready' or what to fix, as text of at most 80 columns.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, pstdev
from typing import Any

from sharpen.agent.rollout.statistics import (
    CACHED,
    NAME_IT,
    RolloutStatistics,
    differ,
    is_flat,
    replaced_note,
    summarize,
    without_calls_note,
)
from sharpen.agent.transcript import clean, last_answer, row_lines
from sharpen.config.public import TunerModelConfig
from sharpen.screen import fitted
from sharpen.types import Call, CallStatus, Group, Outcome, Rollout

WIDTH = 80
"""Columns of the report, where the screen has as many."""
MAX_REWARDS_SHOWN = 8
FAILED_TOO_OFTEN = 0.25
TRUNCATED_TOO_OFTEN = 0.1
IDLE_TOO_OFTEN = 0.25
UNCALLED = (
    "no rollout called the model that is trained: make the agent's client of the `model` that the workflow receives "
    "(model.client, or base_url=model.base_url with api_key=model.api_key), and switch off caches that answer in its "
    "place"
)
OUTSIDE = frozenset({Outcome.INFRASTRUCTURE, Outcome.CANCELLED})
"""Failures that do not predict whether the next attempt fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheck:
    """One task: the reward of each rollout (None: no reward), which rollouts failed, and in which the model answered:
    only the rewards of these teach something."""

    task_id: str
    rewards: tuple[float | None, ...]
    failed: tuple[bool, ...]
    answered: tuple[bool, ...]

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards that count."""
        return pstdev(self.counted) if len(self.counted) > 1 else 0.0

    @property
    def counted(self) -> list[float]:
        """The rewards of the rollouts that the model answered."""
        return [one for one, answered in zip(self.rewards, self.answered, strict=True) if answered and one is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One rollout of the check, to be read: its task's row as lines (what was asked and what is expected), what the
    model said last, and the reward that it got."""

    rollout_id: str
    row: tuple[str, ...]
    said: str
    reward: float

    def lines(self, name: str, width: int = WIDTH) -> list[str]:
        """Return the try as text of `width` columns."""
        text = [f"{name} try: reward {self.reward:g} ({self.rollout_id.removeprefix('check/')})"]
        for line in (*self.row, f"said: {self.said or 'nothing'}"):
            text += fitted(f"  {' '.join(clean(line).split())}", width, hanging=4)
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of the check. `ready` is false if a finding prevents training.

    `has_signal`: at least one group has rewards that differ, or no rewards are needed. `uncalled`: rollouts ended well,
    and in none of them the model was called. `trains`: at least one sampled
    token may carry loss, or could if the workflow had not left its call out. `all_failed`: if every rollout's first
    attempt failed, the reasons; else empty. `lengths`: the sampled tokens of a rollout (minimum, median, maximum).
    `seconds`: the median duration of a rollout. `step_s`: the estimated duration of a step's rollouts (None: not
    measured). `best` and `worst` are the tries of the highest and the lowest reward (None: no reward). `gradients` is
    what came of comparing the trainer's with a plain loop's (empty: nothing was compared).
    """

    ready: bool
    has_signal: bool
    uncalled: bool
    trains: bool
    findings: tuple[str, ...]
    tasks: tuple[TaskCheck, ...]
    lengths: tuple[int, float, int]
    seconds: float
    statistics: RolloutStatistics
    all_failed: str = ""
    step_s: float | None = None
    best: Try | None = None
    worst: Try | None = None
    gradients: str = ""

    @property
    def pace(self) -> str:
        """The durations of a rollout and of a step's rollouts, as text."""
        of_step = "" if self.step_s is None else f", {self.step_s:.3g} s for a step's at this pace"
        return f"{self.seconds:.2f} s a rollout (median){of_step}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        content = {**asdict(self), "statistics": self.statistics.metrics()}
        content["failures"] = {outcome.value: count for outcome, count in self.statistics.failures.items()}
        return content

    def lines(self, width: int = WIDTH) -> list[str]:
        """Return the report as plain text, at most `width` columns wide, and at most 80."""
        width = min(width, WIDTH)
        found = self.statistics
        least, middle, most = self.lengths
        failures = ", ".join(f"{count} {outcome.value}" for outcome, count in found.failures.items()) or "none"
        longest = max((len(task.task_id) for task in self.tasks), default=4)
        of_id = min(max(longest, 4), 24)
        text = [f"{'task':<{of_id}}  {'spread':>6}  rewards"]
        text += [f"{task.task_id[-of_id:]:<{of_id}}  {task.spread:>6.3f}  {_rewards(task)}" for task in self.tasks]
        text += [
            "rewards     none"
            if math.isnan(found.reward_mean)
            else f"rewards     mean {found.reward_mean:.3f}, spread {found.reward_std:.3f}; {differing(found)}",
            f"lengths     {least} to {most} sampled tokens a rollout (median {middle:g}), {found.mean_calls:.1f} calls",
            f"truncated   {_percent(found.truncated_share)} of calls stopped at their token limit",
            f"time        {self.pace}",
            f"failures    {failures}",
            *([f"gradients   {self.gradients}"] if self.gradients else []),
        ]
        text = [line for long in text for line in fitted(long, width, hanging=12)]
        for name, one in (("best", self.best), ("worst", self.worst)):
            text += [] if one is None else ["", *one.lines(name, width)]
        if self.best is not None:
            text.append("")
        for finding in self.findings:
            text += fitted(f"! {' '.join(finding.split())}", width, hanging=2)
        text.append("ready" if self.ready else "not ready: see the lines that begin with '!'")
        return text


def check_groups(
    groups: Sequence[Group],
    *,
    needs_reward: bool = True,
    needs_ratio: bool = True,
    model: TunerModelConfig | None = None,
) -> CheckReport:
    """Make the report of the check's groups.

    Without `needs_reward`, equal or missing rewards are no problem; without `needs_ratio`, calls with `top_p` or
    `top_k` are none. `model` holds the run's sampling parameters, to compare the agent's own with (None: not compared).
    """
    statistics = summarize(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    calls = [call for rollout in rollouts for call in rollout.calls]
    tokens = [sum(len(call.sampled_ids_S) for call in rollout.calls) for rollout in rollouts] or [0]
    tasks = tuple(
        TaskCheck(
            task_id=group.task.id,
            rewards=tuple(rollout.reward for rollout in group.rollouts),
            failed=tuple(not rollout.scored for rollout in group.rollouts),
            answered=tuple(rollout.answered for rollout in group.rollouts),
        )
        for group in groups
    )
    has_signal = not needs_reward or _has_signal(tasks)
    uncalled = not calls and statistics.num_without_calls > 0
    problems = [*_problems(statistics, tasks, uncalled, has_signal), *_nothing_trains(calls)]
    all_failed = _all_failed(groups, statistics)
    if all_failed and not statistics.failures:  # each rollout succeeded in a retry
        problems.append(" ".join(all_failed.split()))
    habits = [cached_answers(groups)]
    if model is not None:
        if needs_ratio:
            problems += filter(None, [own_truncation(groups, model)])
        habits.append(own_temperature(groups, model))
    scored = [(group, one) for group in groups for one in group.rollouts if one.reward is not None]
    tries = [_try(*pick(scored, key=_reward_of)) if scored else None for pick in (max, min)]
    return CheckReport(
        ready=not problems,
        has_signal=has_signal,
        uncalled=uncalled,
        trains=any(call.trainable or _left_out(call) for call in calls),
        findings=(*problems, *_remarks(statistics, calls), *filter(None, habits)),
        tasks=tasks,
        lengths=(min(tokens), median(tokens), max(tokens)),
        seconds=median([rollout.seconds for rollout in rollouts] or [0.0]),
        statistics=statistics,
        all_failed=all_failed,
        best=tries[0],
        worst=tries[1],
    )


def _reward_of(pair: tuple[Group, Rollout]) -> float:
    assert pair[1].reward is not None, "only scored rollouts are compared"
    return pair[1].reward


def _try(group: Group, rollout: Rollout) -> Try:
    return Try(
        rollout_id=rollout.id,
        row=tuple(row_lines(group.task.row)),
        said=last_answer(rollout),
        reward=_reward_of((group, rollout)),
    )


def _all_failed(groups: Sequence[Group], found: RolloutStatistics) -> str:
    """Return the reasons if every rollout's first attempt failed; else an empty string.

    Also empty if a server failed but a later attempt succeeded: it may be back.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    firsts = {(one.group_id, one.index): one for group in groups for one in (*group.rollouts, *group.attempts)}
    firsts |= {(one.group_id, one.index): one for group in groups for one in group.attempts if one.attempt == 0}
    if not rollouts or any(first.scored for first in firsts.values()):
        return ""
    if any(one.scored for one in rollouts) and any(first.outcome in OUTSIDE for first in firsts.values()):
        return ""
    return (
        f"the first attempt of each of the {len(firsts)} rollouts failed; by cause, with the first error of each:\n"
        + "\n".join(f"  {line}" for line in _cause_lines(firsts.values()))
    )


def _cause_lines(failed: Collection[Rollout]) -> list[str]:
    by_cause: dict[Outcome, list[Rollout]] = {}
    for rollout in failed:
        by_cause.setdefault(rollout.outcome, []).append(rollout)
    hint = {Outcome.WORKFLOW_ERROR: f" ({NAME_IT})"}
    return [
        f"{len(rollouts)} x {cause.value}: {rollouts[0].error or 'no message'}{hint.get(cause, '')}"
        for cause, rollouts in by_cause.items()
    ]


def _has_signal(tasks: Sequence[TaskCheck]) -> bool:
    """Whether rewards differ within a task, or between tasks if each has one rollout."""
    if any(len(task.rewards) > 1 for task in tasks):
        return any(differ(task.counted) for task in tasks)
    return differ([reward for task in tasks for reward in task.counted])


def differing(found: RolloutStatistics) -> str:
    """Return how many tasks have rewards that differ, as text; with one rollout for each, whether the tasks' do."""
    if found.num_groups and found.num_rollouts == found.num_groups:
        return f"{found.num_groups} tasks with one rollout each"
    return f"{found.num_spread_groups} of {found.num_groups} tasks with differing rewards"


def _problems(found: RolloutStatistics, tasks: Sequence[TaskCheck], uncalled: bool, has_signal: bool) -> list[str]:
    """Return messages about what prevents training."""
    problems = []
    num_failed = sum(found.failures.values())
    if num_failed > FAILED_TOO_OFTEN * found.num_rollouts or not found.num_rollouts:
        problems.append(f"{num_failed} of {found.num_rollouts} rollouts failed: {_first_failures(found)}")
    if uncalled:
        problems.append(UNCALLED)
    elif found.num_without_calls > IDLE_TOO_OFTEN * found.num_rollouts:
        problems.append(without_calls_note(found, "they teach nothing"))
    if not uncalled and found.num_excluded < found.num_rollouts and not has_signal:
        problems.append(_no_spread(tasks))
    return problems


def _nothing_trains(calls: Sequence[Call]) -> list[str]:
    """Return a message if there are calls but none can carry loss; else an empty list."""
    if not calls or any(call.trainable for call in calls):
        return []
    greedy = sum(call.sampling.temperature <= 0 for call in calls)
    if greedy == len(calls):
        return [
            f"all {len(calls)} calls were sampled at temperature 0, which the agent sets itself: such calls are never "
            "trained, so nothing would be learnt; leave the temperature out of its calls, to use model.temperature"
        ]
    if all(_left_out(call) for call in calls):
        return [
            f"the workflow left all {len(calls)} calls out of training: nothing would be learnt from these tasks "
            "(a workflow may imitate only what succeeded, or what was not cut at its token limit)"
        ]
    return [
        f"none of the {len(calls)} calls can be trained ({greedy} were sampled at temperature 0, the others were not "
        "delivered, or were left out by the workflow): nothing would be learnt"
    ]


def _left_out(call: Call) -> bool:
    """Whether only the workflow's choice keeps the call out of training, which may differ on other tasks."""
    return call.status == CallStatus.LEFT_OUT and call.sampling.temperature > 0


def _no_spread(tasks: Sequence[TaskCheck]) -> str:
    rewards = [reward for task in tasks for reward in task.counted]
    if len(rewards) < 2:
        return f"{len(rewards)} rollouts that the model answered have a reward: there is nothing to compare"
    if differ(rewards):
        return (
            "the rewards differ between tasks, but never within one: nothing can be learnt; sample with a higher "
            "temperature, or choose tasks that the model solves sometimes"
        )
    reward = rewards[0]
    every = f"every reward is the same ({reward:g}): nothing can be learnt; "
    if reward == 0:
        return every + "all answers may be wrong (tasks too hard), or the judge never recognizes a right one"
    if reward == 1:
        return every + "all answers may be right (tasks too easy), or the judge accepts anything"
    return every + "the judge seems to be constant"


def _remarks(found: RolloutStatistics, calls: Sequence[Call]) -> list[str]:
    """Return messages about what is worth knowing but does not prevent training."""
    remarks = []
    num_failed = sum(found.failures.values())
    if 0 < num_failed <= FAILED_TOO_OFTEN * found.num_rollouts:
        remarks.append(f"{num_failed} of {found.num_rollouts} rollouts failed: {_first_failures(found)}")
    if found.retries:
        outcomes = [outcome for outcome in found.retries if outcome not in found.failures]
        if outcomes:
            first = "; ".join(
                f"{outcome.value}: {found.first_errors.get(outcome, 'no message')}" for outcome in outcomes
            )
            remarks.append(f"{sum(found.retries.values())} attempts failed and were repeated: {first}")
    if found.num_replaced:
        remarks.append(replaced_note(found))
    if found.truncated_share > TRUNCATED_TOO_OFTEN:
        remarks.append(
            f"{_percent(found.truncated_share)} of the calls stopped at their token limit: raise model.max_tokens "
            "(and model.max_model_len), or ask for shorter answers"
        )
    greedy = sum(call.sampling.temperature <= 0 for call in calls)
    if 0 < greedy < len(calls):
        remarks.append(
            f"{greedy} of {len(calls)} calls were sampled at temperature 0: they are context only, and never trained"
        )
    offered = [call for call in calls if call.tools]
    if offered and not any(call.response.get("tool_calls") for call in offered):
        remarks.append(
            "tools were offered, but no answer called one: check model.tool_call_parser (the format of calls; the run "
            "says which it found) and the model's chat template"
        )
    if calls and 0 < found.num_without_calls <= IDLE_TOO_OFTEN * found.num_rollouts:
        remarks.append(without_calls_note(found, "they teach nothing"))
    return remarks


def _first_failures(found: RolloutStatistics) -> str:
    if not found.failures:
        return "there were none"
    return "; ".join(
        f"{count} x {outcome.value} ({found.first_errors.get(outcome, 'no message')})"
        for outcome, count in found.failures.items()
    )


def _rewards(task: TaskCheck) -> str:
    pairs = list(zip(task.rewards, task.failed, strict=True))[:MAX_REWARDS_SHOWN]
    text = " ".join("fail" if failed else "none" if reward is None else f"{reward:.4g}" for reward, failed in pairs)
    more = len(task.rewards) - MAX_REWARDS_SHOWN
    return text + (f" and {more} more" if more > 0 else "")


def _percent(share: float) -> str:
    return "none" if not share > 0 else f"{100 * share:.0f}%"


# Habits of the agent's code that hinder training: its own sampling parameters, cached answers.
#
# In: the groups of the pre-flight check. Out: messages that say what was found and what to do.


def own_truncation(groups: Sequence[Group], model: TunerModelConfig) -> str | None:
    """Return a message if the agent sets its own `top_p`, `top_k` or `min_p` and the engine does not record what they
    left of the distribution, so that these tokens cannot be trained on; else None."""
    calls = _sampled_calls(groups)
    values = Counter(
        f"{name} {value:g}" for call in calls if not call.has_ratio for name, value in [*call.sampling.cuts.items()][:1]
    )
    if not values:
        return None
    return (
        f"the agent sets {_join_values(values)} itself in {sum(values.values())} of {len(calls)} calls (model.top_p is "
        f"{model.top_p:g}): the engine does not record which tokens that leaves, so that these have no probability "
        "ratio, and the first step would fail; remove it from the agent's code, use the embedded engine, or train "
        "without a ratio (raft)"
    )


def own_temperature(groups: Sequence[Group], model: TunerModelConfig) -> str | None:
    """Return a message if the agent sets a temperature other than the run's, with its effect on groups; else None.

    Temperature 0 is reported elsewhere: such calls are not trained at all.
    """
    calls = _sampled_calls(groups)
    values = Counter(
        f"{call.sampling.temperature:g}" for call in calls if call.sampling.temperature != model.temperature
    )
    if not values:
        return None
    lower = max(call.sampling.temperature for call in calls) < model.temperature
    effect = "answers to one task differ little, and equal rewards teach nothing" if lower else "it is used"
    return (
        f"the agent sets temperature {_join_values(values)} itself in {sum(values.values())} of {len(calls)} calls, "
        f"where model.temperature is {model.temperature:g}: {effect} ({sum(map(is_flat, groups))} of {len(groups)} "
        "groups have equal rewards); remove it from the agent's code (LlamaIndex sends 0.1 by default), or set "
        "model.temperature to it"
    )


def cached_answers(groups: Sequence[Group]) -> str | None:
    """Return a message if rollouts' histories contain answers that a sibling received; else None.

    A cache served them again, so that each rollout of the group begins with the same answer.
    """
    cached = [rollout for group in groups for rollout in _with_sibling_answers(group)]
    if not cached:
        return None
    num_rollouts = sum(len(group.rollouts) for group in groups)
    return (
        f"{len(cached)} of {num_rollouts} rollouts (the first: {cached[0].id}) continue from an answer given to "
        f"another rollout of their task: {CACHED}"
    )


def _with_sibling_answers(group: Group) -> list[Rollout]:
    """Return the rollouts whose first call continues from an answer of a sibling.

    A message that precedes the first call of every rollout is an example, not an answer.
    """
    received = {rollout.id: {_content_key(call.response) for call in rollout.answers} for rollout in group.rollouts}
    before = {
        rollout.id: {
            _content_key(message) for message in rollout.answers[0].messages if message.get("role") == "assistant"
        }
        for rollout in group.rollouts
        if rollout.answers
    }
    examples = set.intersection(*before.values()) if before else set[str]()
    matches = []
    for rollout in group.rollouts:
        siblings = set[str]().union(*(answers for id_, answers in received.items() if id_ != rollout.id))
        if (before.get(rollout.id, set()) - examples) & siblings:
            matches.append(rollout)
    return matches


def _content_key(message: Mapping[str, Any]) -> str:
    """Return an assistant message's text and tool calls, without their ids, as a comparable string."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("content"), calls], sort_keys=True, default=repr)


def _sampled_calls(groups: Sequence[Group]) -> list[Call]:
    """Return the calls that the agent received, except greedy ones."""
    calls = [call for group in groups for rollout in group.rollouts for call in rollout.answers]
    return [call for call in calls if call.sampling.temperature > 0]


def _join_values(values: Counter[str]) -> str:
    return " and ".join(value for value, _ in values.most_common())
