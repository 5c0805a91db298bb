"""The verdict, computed again from the rollouts of the evaluations.

In: `evaluations.db`, `summary.json`, and the position that the last checkpoint holds. Out: a `Judged`: what the
evaluations before and after say, whether every task is there once in each mode, and each sentence of the summary's
numbers and verdict that does not follow. Shares no code with what evaluates and judges.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sharpen.config.run import HELD_OUT, RunConfig
from sharpen.errors import JournalError
from sharpen.evidence.certificate.evaluations import (
    Evaluated,
    TaskResult,
    few,
    read_passes,
    read_results,
)
from sharpen.evidence.certificate.intervals import difference, mean_interval, two_values
from sharpen.evidence.certificate.lineage import Lineage
from sharpen.learning.experience.evidence import read_sessions
from sharpen.learning.experience.records import EVALUATIONS

MODES = ("greedy", "sampled")
MIN_TASKS = 10
"""With fewer held-out tasks there is no verdict."""
LOSS = "held-out loss"
OF_ROWS = "it is of the losses of held-out rows"
WORDS = {"better": "better by ", "worse": "worse by ", "not_shown": "not shown to be better: ", "unknown": "none: "}


@dataclass(frozen=True, slots=True)
class Judged:
    """`line` says what was computed again, and agrees (empty: nothing)."""

    line: str = ""
    problems: tuple[str, ...] = ()
    not_recomputed: tuple[str, ...] = ()


def judge_again(run_dir: Path, config_of: Callable[[int], RunConfig], lineage: Lineage) -> Judged:
    """Compute the verdict again. `config_of` returns the settings of a step."""
    try:
        summary = _read_summary(run_dir / "summary.json")
        there, frozen = (run_dir / EVALUATIONS).exists(), frozenset(config_of(_last(lineage)).policies)
        results = [*read_results(run_dir / EVALUATIONS, frozen)] if there else None
        if reason := _why_not(summary, results, lineage):
            return Judged(not_recomputed=(f"the verdict: {reason}",))
        if summary is None or not results:
            return Judged()
        check = _Check(run_dir, summary, config_of, lineage)
        check.evaluations(results)
        check.verdict()
    except JournalError as error:
        return Judged(not_recomputed=(f"the verdict: {error}",))
    except (OSError, ValueError) as error:
        return Judged(problems=(f"the verdict cannot be computed again: {error}",))
    kind = _part(summary, "verdict").get("kind", "none yet")
    agrees = check.num_rewards and not check.problems and not check.missing
    line = f"{check.num_rewards:,} rewards read again: {kind}" if agrees else ""
    return Judged(
        line, tuple(check.problems), tuple(f"the verdict: {reason}" for reason in (*check.missing, *check.notes))
    )


def _why_not(summary: Mapping[str, Any] | None, results: Sequence[TaskResult] | None, lineage: Lineage) -> str:
    """Return why nothing can be computed again; empty if it can, or if nothing was evaluated."""
    last = _last(lineage)
    if summary is None:
        return "there is no summary.json, as the run has not ended" if results else ""
    if summary.get("steps") != last and (results or _claims(summary)):
        return f"summary.json is of step {summary.get('steps')}, the weights are of step {last}"
    if not results and _claims(summary):
        of_rows = _part(summary, "verdict").get("measure") == LOSS
        return OF_ROWS if of_rows else f"there is no {EVALUATIONS}" if results is None else f"{EVALUATIONS} holds none"
    return ""


def _claims(summary: Mapping[str, Any]) -> bool:
    """Whether the summary says anything about rewards or losses of held-out tasks or rows."""
    judged = _part(summary, "verdict").get("kind", "unknown") != "unknown"
    return judged or any(summary.get(moment) for moment in ("before", "after"))


def _last(lineage: Lineage) -> int:
    return lineage.steps[-1].step if lineage.steps else 0


class _Check:
    def __init__(
        self, run_dir: Path, summary: Mapping[str, Any], config_of: Callable[[int], RunConfig], lineage: Lineage
    ) -> None:
        sessions = read_sessions(run_dir / "run.db")
        self._summary, self._config_of, self._last = summary, config_of, _last(lineage)
        self._versions = {0: 0} | {record.step: record.version for record in lineage.steps}
        self._several = len(sessions) != 1  # an earlier session's evaluations may be there, or lost
        self._begins = {session.version for session in sessions} or {0}
        self._state = _position(run_dir, lineage)
        self._best_kept = (run_dir / "best").exists()
        self._found: dict[tuple[str, str, str], Evaluated] = {}
        self._earlier: dict[int, dict[str, Evaluated]] = {}
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.notes: list[str] = []
        self.num_rewards = 0

    def evaluations(self, results: Sequence[TaskResult]) -> None:
        """Compare the evaluations with the summary, set by set and mode by mode."""
        for one in read_passes(results, merged=not self._several):
            self._place(one)
        for moment in ("before", "after"):
            present = [key[1] for key in self._found if key[0] == moment]
            for tasks in dict.fromkeys([HELD_OUT, *_part(self._summary, "further"), *present]):
                if self._told(moment, tasks):
                    for mode in MODES:
                        self._compare(moment, tasks, mode)
                elif tasks in present and not self._several and not self._summary.get("error"):
                    where = moment if tasks == HELD_OUT else f"{moment}, {tasks}"
                    self.problems.append(f"{EVALUATIONS} has the evaluation {where}, summary.json does not")
        for step, modes in self._earlier.items():
            for mode in MODES:
                if mode in modes:
                    self.problems += self._faults(modes[mode])
                else:
                    self._lacks(f"step-{step}", HELD_OUT, mode)
        self._compare_numbers()
        self._find_copies()

    def _place(self, one: Evaluated) -> None:
        """Note an evaluation, if it is of the weights that it should be of; a later one replaces it."""
        number = re.fullmatch(r"step-(\d+)", one.moment)
        step = int(number.group(1)) if number else 0 if one.moment == "before" else self._step_of(one.version)
        counted = _noted(self._state, one.moment, one.set, one.mode)
        one.score(self._config_of(max(step, 1)).rollout.failure_reward or 0.0, counted)
        if one.moment == "before" and one.version in self._begins:
            self._found["before", one.set, one.mode] = one
        elif one.moment == "after" and one.version == self._versions[self._last]:
            self._found["after", one.set, one.mode] = one
        elif one.set == HELD_OUT and 0 < step < self._last and one.version == self._versions.get(step):
            self._earlier.setdefault(step, {})[one.mode] = one

    def _step_of(self, version: int) -> int:
        return next((step for step, after in self._versions.items() if version == after), 0)

    def _faults(self, one: Evaluated) -> Iterable[str]:
        held_out = [other for modes in self._earlier.values() for other in modes.values()]
        same_set = [other for other in (*self._found.values(), *held_out) if other.set == one.set]
        every = dict.fromkeys(result.task for other in same_set for result in other.tasks)
        if one.is_cold:
            self.notes.append(
                f"{one.name}: all calls are at temperature 0, as greedy ones, unless the agent asks for it"
            )
        return one.faults(every)

    def _compare(self, moment: str, tasks: str, mode: str) -> None:
        """Check the records of one evaluation that the summary has, and its rewards against the checkpoint's."""
        one = self._found.get((moment, tasks, mode))
        if one is None:
            self._lacks(moment, tasks, mode)
            return
        self.problems += self._faults(one)
        self.num_rewards += len(one.rewards)
        if not (noted := _noted(self._state, moment, tasks, mode)):
            return
        wrong = [
            f"{task} has {one.rewards.get(task)} in the records and {noted.get(task)} in the checkpoint"
            for task in dict.fromkeys([*one.rewards, *noted])
            if not _same(one.rewards.get(task), noted.get(task))
        ]
        if wrong:
            self.problems.append(f"{one.name}: {len(wrong)} rewards are not those of the records: {few(wrong)}")

    def _told(self, moment: str, tasks: str) -> Mapping[str, Any]:
        """What the summary says of an evaluation, by mode."""
        return _part(self._summary, *(() if tasks == HELD_OUT else ("further", tasks)), moment)

    def _lacks(self, moment: str, tasks: str, mode: str) -> None:
        where = f"{EVALUATIONS} has no evaluation {moment}, {tasks}, {mode} of the weights in question"
        (self.missing if self._several else self.problems).append(where)

    def _compare_numbers(self) -> None:
        among = {reward for one in self._found.values() for reward in one.rewards.values()}
        for (moment, tasks, mode), one in self._found.items():
            if not (told := self._told(moment, tasks)):
                continue
            rewards = [*one.rewards.values()]
            found = {"accuracy": fmean(rewards) if rewards else math.nan, "num_tasks": len(rewards)}
            if not self.missing:  # the rewards of all evaluations decide which interval it is
                found["low"], found["high"] = mean_interval(rewards, among) if rewards else (math.nan, math.nan)
            self._agree(one.name, found, _part(told, mode))

    def _find_copies(self) -> None:
        """Two evaluations never share a rollout: each was started at a moment of its own."""
        seen: dict[tuple[str, float], str] = {}
        copied: Counter[tuple[str, str]] = Counter()
        for one in [*self._found.values(), *(one for modes in self._earlier.values() for one in modes.values())]:
            for result in one.tasks:
                for started in {rollout.started for rollout in result.rollouts if rollout.started is not None}:
                    other = seen.setdefault((result.task, started), one.name)
                    copied[other, one.name] += other != one.name
        for (first, second), count in copied.items():
            if count:
                self.problems.append(f"{second}: {count} rollouts are those of ({first})")

    def _agree(self, name: str, found: Mapping[str, float], told: Mapping[str, Any]) -> None:
        for key, value in found.items():
            if not _same(None if math.isnan(value) else value, told.get(key)):
                self.problems.append(f"{name}: summary.json says {key} {told.get(key)}, the records {value:.6g}")

    def verdict(self) -> None:
        """Compare the verdict with what the rewards say."""
        told = _part(self._summary, "verdict")
        if not told:
            if not self._summary.get("error"):
                self.missing.append("summary.json has none")
            return
        if not self._found and told.get("measure") == LOSS:
            self.missing.append(OF_ROWS)
            return
        if self.missing:
            return
        found = self._judge(self._modes("before"), self._modes("after"), told)
        if self.missing:
            return
        wrong_model = found["kind"] != "unknown" and told.get("original") == (found["kind"] == "better")
        if told.get("kind") != found["kind"] or wrong_model:
            text = f"the verdict is {told.get('kind')!r}, but the records say {found['kind']!r}"
            self.problems.append(f"{text} ({', '.join(f'{key} {value}' for key, value in found.items())})")
        elif not str(told.get("text")).startswith(WORDS[found["kind"]]):
            self.problems.append(f"the verdict is {found['kind']!r}, but its sentence is {told.get('text')!r}")
        else:
            self._agree("the verdict", {key: value for key, value in found.items() if key != "kind"}, told)
            if found["kind"] == "better" and _number_of(str(told.get("model"))) != found["step"]:
                self.problems.append(f"the verdict is of step {found['step']}, its model is {told.get('model')}")

    def _modes(self, moment: str) -> dict[str, Evaluated]:
        return {mode: one for (when, tasks, mode), one in self._found.items() if (when, tasks) == (moment, HELD_OUT)}

    def _judge(
        self, before: Mapping[str, Evaluated], after: Mapping[str, Evaluated], told: Mapping[str, Any]
    ) -> dict[str, Any]:
        of_time = ((before, self._config_of(1)), (after, self._config_of(self._last)))
        if any(one.is_void(config) for of, config in of_time for one in of.values()) or not (before and after):
            return {"kind": "unknown"}
        mode: str = self._config_of(self._last).evaluation.decided_by
        if not (before[mode].rewards if mode in before else {}) or not (after[mode].rewards if mode in after else {}):
            mode = next(one for one in MODES if one != mode)
        step, looks = self._best(mode, before, after, told)
        best = self._earlier.get(step, {}) if step else {}
        among = {reward for one in (*self._found.values(), *best.values()) for reward in one.rewards.values()}
        first, final = before[mode].rewards, after[mode].rewards
        gain = difference(first, final, among, 1)
        kind = "better" if gain[1] > 0.0 else "worse" if gain[2] < 0.0 else "not_shown"
        if gain[3] < MIN_TASKS or math.isnan(gain[1]):
            return {"kind": "unknown"}
        at = self._last
        if best and difference(final if kind == "better" else first, best[mode].rewards, among, looks)[1] > 0.0:
            kind, at, gain = "better", step, difference(first, best[mode].rewards, among, looks)
        measure = f"{mode} {'accuracy' if two_values(among) == (0.0, 1.0) else 'reward'}"
        if told.get("measure") != measure:
            self.problems.append(f"the verdict is by {told.get('measure')!r}, the settings and records say {measure!r}")
        return {"kind": kind, "step": at, "difference": gain[0], "low": gain[1], "high": gain[2], "num_tasks": gain[3]}

    def _best(
        self, mode: str, before: Mapping[str, Evaluated], after: Mapping[str, Evaluated], told: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Return the best of the evaluated steps (0: none is better than the start, or it is the last one), and how
        many were evaluated before the last one, at least 1."""
        best, best_step = before[mode].rewards, 0
        for step, modes in [*sorted(self._earlier.items()), (self._last, after)]:
            if mode not in modes or any(one.is_void(self._config_of(step)) for one in modes.values()):
                continue
            gain = difference(best, modes[mode].rewards, (), 1)[0]
            if gain > 0.0 or (gain == 0.0 and best_step):
                best, best_step = modes[mode].rewards, step
        count = len(self._earlier) + 1
        noted = self._state.get("best_step", best_step or None) or 0, self._state.get("num_evaluated", count)
        if noted != (best_step, count):
            text = f"step {best_step} is best of {count} evaluated, the checkpoint says step {noted[0]} of {noted[1]}"
            unclear = any(one.is_unclear for modes in self._earlier.values() for one in modes.values())
            (self.missing if self._several or unclear else self.problems).append(text)
        kept = self._best_kept or told.get("step") == best_step  # its folder may be gone by now
        return (best_step if kept and best_step != self._last else 0), max(1, count - 1)


def _read_summary(path: Path) -> Mapping[str, Any] | None:
    """Return `summary.json`, None if there is none. Raises `ValueError` if it is damaged."""
    try:
        return _part({path.name: json.loads(path.read_text(encoding="utf-8"))}, path.name)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def _part(tree: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the object below these names, empty if there is none. Raises `ValueError` for what is no object."""
    for name in names:
        found = tree.get(name)
        if found is not None and not isinstance(found, dict):
            raise ValueError(f"{'.'.join(names)}: {name!r} is no object")
        tree = found or {}
    return tree


def _position(run_dir: Path, lineage: Lineage) -> Mapping[str, Any]:
    """What the last checkpoint knows of the evaluations; empty if there is none."""
    if lineage.weights is None:
        return {}
    text = (run_dir / lineage.weights.name / "trainer_state" / "state.json").read_text(encoding="utf-8")
    return _part(json.loads(text), "position")


def _noted(position: Mapping[str, Any], moment: str, tasks: str, mode: str) -> Mapping[str, float]:
    """The rewards by task in a checkpoint's position; those of earlier versions have fewer layers."""
    content = _part(position, moment)
    content = _part(content, "rewards") if "rewards" in content else content
    return _part(content, *(() if tasks == HELD_OUT else ("further", tasks)), mode)


def _number_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder."""
    number = re.search(r"\d+$", name)
    return None if number is None else int(number.group())


def _same(first: float | None, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    return isinstance(second, int | float) and math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-6)
