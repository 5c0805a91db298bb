"""The evaluations of a run, read again from their rollouts.

In: the groups of `evaluations.db`. Out: an `Evaluated` for each moment, set and mode: the reward of each task, and what
is wrong with the records themselves: tasks that are missing or there twice, calls that were sampled otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from sharpen.config.run import RunConfig
from sharpen.types import MODEL_CAUSED, Group, Outcome, Rollout

SHOWN = 3
"""Tasks named in a sentence."""


@dataclass(slots=True, kw_only=True)
class Evaluated:
    """One evaluation of a set in a mode: `groups` in the order they were added."""

    moment: str
    tasks: str
    mode: str
    version: int
    groups: list[Group] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As people say it: `after, held-out, sampled`."""
        return f"{self.moment}, {self.tasks}, {self.mode}"

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of all groups."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    def score(self, failure: float, counted: Mapping[str, float]) -> None:
        """Set the mean reward of each task. A failure of the model, or of a workflow that had answers, counts
        `failure`; where the records do not say whether there were answers (the process died), `counted` does."""
        for group in self.groups:
            found = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
            found += [failure] * sum(_fails(one, group.task.id in counted) for one in group.rollouts)
            if found:
                self.rewards[group.task.id] = fmean(found)

    def is_void(self, config: RunConfig) -> bool:
        """Whether too many rollouts had no answer of the model, or no reward, to say anything about it."""
        silent = sum(one.outcome == Outcome.OK and not one.answers for one in self.rollouts)
        left_out = len(self.groups) - len(self.rewards)
        return silent > config.evaluation.max_without_calls * len(
            self.rollouts
        ) or left_out > config.rollout.max_excluded_share * len(self.rollouts)

    def faults(self, every: Iterable[str], own: bool) -> Iterable[str]:
        """Yield what is wrong with the records themselves. `every`: the set's tasks in all evaluations. `own`: the set
        has arguments of its own, which may ask for temperature 0."""
        counts = Counter(group.task.id for group in self.groups)
        if missing := [task for task in every if task not in counts]:
            yield f"{self.name}: {len(missing)} tasks were not evaluated: {few(missing)}"
        if twice := [task for task, count in counts.items() if count > 1]:
            yield f"{self.name}: {len(twice)} tasks were evaluated more than once: {few(twice)}"
        if len(sizes := {len(group.rollouts) for group in self.groups}) > 1:
            yield f"{self.name}: some tasks have {min(sizes)} rollouts, others {max(sizes)}"
        calls = [call for rollout in self.rollouts for call in rollout.calls if len(call.sampled_ids_S)]
        if others := {int(v) for call in calls for v in call.versions_S if v != self.version}:
            yield f"{self.name}: of weights of version {self.version}, but tokens were sampled by versions {others}"
        hot = sum(call.sampling.temperature > 0 for call in calls)
        if self.mode == "greedy" and hot:
            yield f"{self.name}: {hot} of {len(calls)} calls are not at temperature 0"
        if self.mode == "sampled" and calls and not hot and not own:
            yield f"{self.name}: all {len(calls)} calls are at temperature 0, those that trained are not"


def read_passes(groups: Iterable[Group], *, merged: bool) -> list[Evaluated]:
    """Split the groups into evaluations. `merged`: one session made all of them, so that each is one evaluation even
    if its groups are not together. An interrupted evaluation that was begun again begins with its first task."""
    found: list[Evaluated] = []
    for group in groups:
        moment, _, rest = group.id.removesuffix(f"/{group.task.id}").partition("/")
        tasks, _, mode = rest.rpartition("/")
        key = (moment, tasks, mode, group.version)
        known = [
            one for one in (found if merged else found[-1:]) if (one.moment, one.tasks, one.mode, one.version) == key
        ]
        if not known or (not merged and known[-1].groups[0].task.id == group.task.id):
            known = [Evaluated(moment=moment, tasks=tasks, mode=mode, version=group.version)]
            found += known
        known[-1].groups.append(group)
    return found


def _fails(rollout: Rollout, counted: bool) -> bool:
    """Whether a rollout without a reward counts as failed."""
    if rollout.reward is not None or rollout.outcome in MODEL_CAUSED:
        return rollout.reward is None
    of_workflow = rollout.outcome in (Outcome.WORKFLOW_ERROR, Outcome.TIMEOUT, Outcome.BLOCKED_LOOP)
    return of_workflow and (bool(rollout.answers) or counted)


def few(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" …" if len(names) > SHOWN else "")
