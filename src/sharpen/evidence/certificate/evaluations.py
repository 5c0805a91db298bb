"""The evaluations of a run, read again from their rollouts.

In: `evaluations.db`. Out: an `Evaluated` for each moment, set and mode: the reward of each task, and what is wrong with
the records themselves: tasks that are missing or there twice, calls that were sampled otherwise. Of a rollout only what
decides is read, so that evaluations of any length need little memory.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from sharpen.config.run import RunConfig
from sharpen.learning.experience.opening import has, reading
from sharpen.learning.experience.reading import ints, read_call_names
from sharpen.learning.experience.records import CHECK
from sharpen.types import MODEL_CAUSED, CallStatus, Outcome

SHOWN = 3
"""Tasks named in a sentence."""
OF_WORKFLOW = (Outcome.WORKFLOW_ERROR, Outcome.TIMEOUT, Outcome.BLOCKED_LOOP)
"""Failures that count where the agent had an answer of the model."""
NO_ANSWER = (CallStatus.ABANDONED, CallStatus.FOREIGN)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A rollout of an evaluation. `answers` counts the calls whose response the agent received; `calls` those with
    sampled tokens, `hot` the ones of them above temperature 0, and `versions` are the policies that sampled them;
    `frozen` those of calls that a policy answered which does not train."""

    outcome: Outcome
    reward: float | None
    started: float | None
    answers: int
    calls: int
    hot: int
    versions: frozenset[int]
    frozen: frozenset[int] = frozenset()

    def fails(self, counted: bool) -> bool:
        """Whether it has no reward and counts as failed. Where the process died, the records hold no answers of it:
        `counted` then says whether the run counted it."""
        if self.reward is not None:
            return False
        return self.outcome in MODEL_CAUSED or (self.outcome in OF_WORKFLOW and (self.answers > 0 or counted))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The rollouts of a task in one evaluation: `place` is its moment, set and mode (`after/held-out/sampled`)."""

    place: str
    task: str
    version: int
    rollouts: tuple[RolloutResult, ...]


@dataclass(slots=True, kw_only=True)
class Evaluated:
    """One evaluation of a set in a mode: `tasks` in the order they were added."""

    moment: str
    set: str
    mode: str
    version: int
    tasks: list[TaskResult] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As people say it: `after, held-out, sampled`."""
        return f"{self.moment}, {self.set}, {self.mode}"

    @property
    def rollouts(self) -> list[RolloutResult]:
        """The rollouts of all tasks."""
        return [rollout for one in self.tasks for rollout in one.rollouts]

    @property
    def is_unclear(self) -> bool:
        """Whether the records do not tell if a failure counts (its process died)."""
        return any(one.fails(True) and not one.fails(False) for one in self.rollouts)

    def score(self, failure: float, counted: Mapping[str, float]) -> None:
        """Set the mean reward of each task. A failure of the model, or of a workflow that had answers, counts
        `failure`; `counted` are the tasks that have a reward in the checkpoint."""
        for one in self.tasks:
            found = [rollout.reward for rollout in one.rollouts if rollout.reward is not None]
            found += [failure] * sum(rollout.fails(one.task in counted) for rollout in one.rollouts)
            if found:
                self.rewards[one.task] = fmean(found)

    def is_void(self, config: RunConfig) -> bool:
        """Whether too many rollouts had no answer of the model, or no reward, to say anything about it."""
        silent = sum(one.outcome == Outcome.OK and not one.answers for one in self.rollouts)
        left_out = len(self.tasks) - len(self.rewards)
        return silent > config.evaluation.max_without_calls * len(
            self.rollouts
        ) or left_out > config.rollout.max_excluded_share * len(self.rollouts)

    @property
    def is_cold(self) -> bool:
        """Whether it is called sampled, and no call was."""
        return self.mode == "sampled" and any(one.calls for one in self.rollouts) and not self._num_hot

    @property
    def _num_hot(self) -> int:
        return sum(one.hot for one in self.rollouts)

    def faults(self, every: Iterable[str]) -> Iterator[str]:
        """Yield what is wrong with the records themselves. `every`: the set's tasks in all evaluations."""
        counts = Counter(one.task for one in self.tasks)
        if missing := [task for task in every if task not in counts]:
            yield f"{self.name}: {len(missing)} tasks were not evaluated: {few(missing)}"
        if twice := [task for task, count in counts.items() if count > 1]:
            yield f"{self.name}: {len(twice)} tasks were evaluated more than once: {few(twice)}"
        if len(sizes := {len(one.rollouts) for one in self.tasks}) > 1:
            yield f"{self.name}: some tasks have {min(sizes)} rollouts, others {max(sizes)}"
        if others := {version for one in self.rollouts for version in one.versions} - {self.version}:
            of = ", ".join(map(str, sorted(others)))
            yield f"{self.name}: of weights of version {self.version}, but tokens were sampled by version {of}"
        if changed := {version for one in self.rollouts for version in one.frozen} - {0}:
            yield f"{self.name}: a policy that does not train sampled tokens with weights of version {max(changed)}"
        if self.mode == "greedy" and self._num_hot:
            calls = sum(one.calls for one in self.rollouts)
            yield f"{self.name}: {self._num_hot} of {calls} calls are not at temperature 0"


def read_results(path: Path, frozen: Set[str] = frozenset()) -> Iterator[TaskResult]:
    """Yield what the evaluations hold, in the order it was added, without the check before training. `frozen` are the
    agents whose policies do not train. Raises `JournalError`."""
    with reading(path) as connection:
        groups = connection.execute("SELECT key, id, version, task_id FROM groups ORDER BY key").fetchall()
        for key, id_, version, task in groups:
            if id_.partition("/")[0] != CHECK:
                rollouts = tuple(_read_rollouts(connection, key, frozen))
                place = id_.removesuffix(f"/{task}")
                yield TaskResult(place=place, task=task, version=version, rollouts=rollouts)


def read_passes(tasks: Iterable[TaskResult], *, merged: bool) -> list[Evaluated]:
    """Divide the tasks into evaluations. `merged`: one session made all of them, so that each is one evaluation even if
    its tasks are not together. An interrupted evaluation that was begun again begins with its first task."""
    found: list[Evaluated] = []
    for one in tasks:
        moment, _, rest = one.place.partition("/")
        set_, _, mode = rest.rpartition("/")
        key = (moment, set_, mode, one.version)
        last = found if merged else found[-1:]
        known = [other for other in last if (other.moment, other.set, other.mode, other.version) == key]
        if not known or (not merged and known[-1].tasks[0].task == one.task):
            known = [Evaluated(moment=moment, set=set_, mode=mode, version=one.version)]
            found += known
        known[-1].tasks.append(one)
    return found


def few(names: Sequence[str]) -> str:
    """The first names."""
    return ", ".join(names[:SHOWN]) + (" …" if len(names) > SHOWN else "")


def _read_rollouts(connection: sqlite3.Connection, group: int, frozen: Set[str]) -> Iterator[RolloutResult]:
    noted = has(connection, "rollout_notes")  # older journals have none
    started = "(SELECT started FROM rollout_notes WHERE rollout_key = key)" if noted else "NULL"
    rollouts = connection.execute(
        f"SELECT key, outcome, reward, {started} FROM rollouts WHERE group_key = ? AND is_final = 1 ORDER BY key",
        (group,),
    )
    for key, outcome, reward, began in rollouts.fetchall():
        answers = calls = hot = 0
        versions: dict[bool, set[int]] = {False: set(), True: set()}
        names = read_call_names(connection, key) if frozen else {}
        for index, status, temperature, sampled_by in connection.execute(
            "SELECT idx, status, temperature, versions FROM calls WHERE rollout_key = ?", (key,)
        ):
            answers += CallStatus(status) not in NO_ANSWER
            calls += len(sampled_by) > 0
            hot += len(sampled_by) > 0 and temperature > 0
            versions[names.get(index, ("", ""))[0] in frozen].update(ints(sampled_by).tolist())
        yield RolloutResult(
            outcome=Outcome(outcome),
            reward=None if reward is None else float(reward),
            started=began,
            answers=answers,
            calls=calls,
            hot=hot,
            versions=frozenset(versions[False]),
            frozen=frozenset(versions[True]),
        )
