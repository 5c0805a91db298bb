"""The verdict, computed again from the rollouts of the evaluations.

In: `evaluations.db`, `summary.json`, and the position that the last checkpoint holds. Out: a `Judged`: what the
evaluations before and after say, whether every task is there once in each mode, and each sentence of the summary's
numbers and verdict that does not follow. Shares no code with what evaluates and judges.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sharpen.certificate.evaluations import Evaluated, few, read_passes
from sharpen.certificate.lineage import Lineage
from sharpen.certificate.plain_intervals import difference, mean_interval, two_values
from sharpen.config.run import HELD_OUT, RunConfig
from sharpen.errors import JournalError
from sharpen.experience.evidence import SessionRecord, read_sessions
from sharpen.experience.reading import read_groups
from sharpen.experience.records import CHECK, EVALUATIONS
from sharpen.types import Group

MODES = ("greedy", "sampled")
MIN_TASKS = 10
"""With fewer held-out tasks there is no verdict."""
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
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        claims = any(summary.get(moment) for moment in ("before", "after"))
    except FileNotFoundError:
        summary, claims = None, False
    except (OSError, ValueError, AttributeError) as error:
        return Judged(problems=(f"summary.json is damaged: {error}",))
    if not (run_dir / EVALUATIONS).exists():
        return Judged(not_recomputed=(f"the verdict: there is no {EVALUATIONS}",) if claims else ())
    try:
        groups = [group for group in read_groups(run_dir / EVALUATIONS) if not group.id.startswith(f"{CHECK}/")]
    except JournalError as error:
        return Judged(not_recomputed=(f"the verdict: {error}",))
    if not groups and not claims:
        return Judged()
    if summary is None:
        return Judged(not_recomputed=("the verdict: there is no summary.json, as the run has not ended",))
    last = lineage.steps[-1].step if lineage.steps else 0
    if summary.get("steps") != last:
        why = f"summary.json is of step {summary.get('steps')}, the weights are of step {last}"
        return Judged(not_recomputed=(f"the verdict: {why}",))
    check = _Check(run_dir, summary, config_of, lineage, read_sessions(run_dir / "run.db"), last)
    check.evaluations(groups)
    check.verdict()
    kind = (summary.get("verdict") or {}).get("kind", "none yet")
    line = f"{check.num_rewards:,} rewards read again: {kind}" if check.num_rewards and not check.problems else ""
    return Judged(line, tuple(check.problems), tuple(f"the verdict: {reason}" for reason in check.missing))


class _Check:
    def __init__(
        self,
        run_dir: Path,
        summary: Mapping[str, Any],
        config_of: Callable[[int], RunConfig],
        lineage: Lineage,
        sessions: Sequence[SessionRecord],
        last: int,
    ) -> None:
        self._summary, self._config_of, self._last = summary, config_of, last
        self._versions = {0: 0} | {record.step: record.version for record in lineage.steps}
        self._several = len(sessions) != 1  # an earlier session's evaluations may be there, or lost
        self._begins = {session.version for session in sessions} or {0}
        self._state = _position(run_dir, lineage)
        self._best_kept = (run_dir / "best").exists()
        self._found: dict[tuple[str, str, str], Evaluated] = {}
        self._earlier: dict[int, dict[str, Evaluated]] = {}
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.num_rewards = 0

    def evaluations(self, groups: Sequence[Group]) -> None:
        """Compare the evaluations before and after with the summary, set by set and mode by mode."""
        passes = read_passes(groups, merged=not self._several)
        for one in passes:
            self._place(one)
        for moment in ("before", "after"):
            told = {HELD_OUT: self._summary.get(moment)}
            told |= {name: of.get(moment) for name, of in self._summary.get("further", {}).items()}
            present = {key[1] for key in self._found if key[0] == moment}
            if told[HELD_OUT] is None and present and not self._several and not self._summary.get("error"):
                self.problems.append(f"{EVALUATIONS} has the evaluation {moment}, summary.json does not")
            for tasks, numbers in told.items():
                for mode in MODES if numbers else ():
                    self._compare(moment, tasks, mode)
        self._compare_numbers()
        self._find_copies()

    def _place(self, one: Evaluated) -> None:
        """Note an evaluation, if it is of the weights that it should be of; a later one replaces it."""
        step = 0 if one.moment == "before" else self._step_of(one)
        counted = _rewards(self._state.get(one.moment), one.tasks).get(one.mode, {})
        one.score(self._config_of(max(step, 1)).rollout.failure_reward or 0.0, counted)
        if one.moment == "before" and one.version in self._begins:
            self._found["before", one.tasks, one.mode] = one
        elif one.moment == "after" and one.version == self._versions[self._last]:
            self._found["after", one.tasks, one.mode] = one
        elif one.tasks == HELD_OUT and 0 < step < self._last and one.version == self._versions.get(step):
            self._earlier.setdefault(step, {})[one.mode] = one

    def _step_of(self, one: Evaluated) -> int:
        if one.moment.startswith("step-"):
            return int(one.moment.removeprefix("step-"))
        return next((step for step, version in self._versions.items() if version == one.version), 0)

    def _compare(self, moment: str, tasks: str, mode: str) -> None:
        """Check the records of one evaluation that the summary has, and its rewards against the checkpoint's."""
        one = self._found.get((moment, tasks, mode))
        if one is None:
            where = f"{EVALUATIONS} has no evaluation {moment}, {tasks}, {mode} of the weights in question"
            (self.missing if self._several else self.problems).append(where)
            return
        every = dict.fromkeys(g.task.id for key, of in self._found.items() if key[1] == tasks for g in of.groups)
        config = self._config_of(max(self._step_of(one), 1))
        self.problems += one.faults(every, own=tasks in config.evaluation.own)
        self.num_rewards += len(one.rewards)
        if (noted := _rewards(self._state.get(moment), tasks).get(mode)) is None:
            return
        wrong = [
            f"{task} has {one.rewards.get(task)} in the records and {noted.get(task)} in the checkpoint"
            for task in dict.fromkeys([*one.rewards, *noted])
            if not _same(one.rewards.get(task), noted.get(task))
        ]
        if wrong:
            self.problems.append(f"{one.name}: {len(wrong)} rewards are not those of the records: {few(wrong)}")

    def _compare_numbers(self) -> None:
        among = {reward for one in self._found.values() for reward in one.rewards.values()}
        for (moment, tasks, mode), one in self._found.items():
            of_set = self._summary if tasks == HELD_OUT else self._summary.get("further", {}).get(tasks, {})
            if (told := (of_set.get(moment) or {}).get(mode)) is None:
                continue
            rewards = [*one.rewards.values()]
            low, high = mean_interval(rewards, among) if rewards else (math.nan, math.nan)
            mean = fmean(rewards) if rewards else math.nan
            found = {"accuracy": mean, "low": low, "high": high, "num_tasks": len(rewards)}
            self._agree(one.name, found, told)

    def _find_copies(self) -> None:
        """Two evaluations never share a rollout: each was started at a moment of its own."""
        seen: dict[tuple[str, float], str] = {}
        copied: Counter[tuple[str, str]] = Counter()
        for one in [*self._found.values(), *(one for modes in self._earlier.values() for one in modes.values())]:
            for rollout in one.rollouts:
                if rollout.started is not None:
                    other = seen.setdefault((rollout.task_id, rollout.started), one.name)
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
        told = self._summary.get("verdict")
        if not told:
            if not self._summary.get("error"):
                self.missing.append("summary.json has none")
            return
        of_rows = self._summary.get("held_out") and not self._summary.get("after")
        if of_rows or told.get("measure") == "held-out loss":
            self.missing.append("it is of the losses of held-out rows")
            return
        if self.missing:
            return
        found = self._judge(self._modes("before"), self._modes("after"), told)
        wrong_model = found["kind"] != "unknown" and told.get("original") == (found["kind"] == "better")
        if told.get("kind") != found["kind"] or wrong_model:
            text = f"the verdict is {told.get('kind')!r}, but the records say {found['kind']!r}"
            self.problems.append(f"{text} ({', '.join(f'{key} {value}' for key, value in found.items())})")
        elif not str(told.get("text")).startswith(WORDS[found["kind"]]):
            self.problems.append(f"the verdict is {found['kind']!r}, but its sentence is {told.get('text')!r}")
        else:
            self._agree("the verdict", {key: value for key, value in found.items() if key != "kind"}, told)

    def _modes(self, moment: str) -> dict[str, Evaluated]:
        return {mode: one for (when, tasks, mode), one in self._found.items() if (when, tasks) == (moment, HELD_OUT)}

    def _judge(
        self, before: Mapping[str, Evaluated], after: Mapping[str, Evaluated], told: Mapping[str, Any]
    ) -> dict[str, Any]:
        config = self._config_of(self._last)
        if any(one.is_void(config) for of in (before, after) for one in of.values()) or not (before and after):
            return {"kind": "unknown"}
        mode: str = config.evaluation.decided_by
        if not (before[mode].rewards if mode in before else {}) or not (after[mode].rewards if mode in after else {}):
            mode = next(one for one in MODES if one != mode)
        step, looks = self._best(mode, before, after)
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

    def _best(self, mode: str, before: Mapping[str, Evaluated], after: Mapping[str, Evaluated]) -> tuple[int, int]:
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
            (self.missing if self._several else self.problems).append(text)
            best_step, count = noted
        kept = best_step in self._earlier and best_step != self._last and self._best_kept
        return (best_step if kept else 0), max(1, count - 1)


def _position(run_dir: Path, lineage: Lineage) -> Mapping[str, Any]:
    """What the last checkpoint knows of the evaluations; empty if there is none."""
    if lineage.weights is None:
        return {}
    text = (run_dir / lineage.weights.name / "trainer_state" / "state.json").read_text(encoding="utf-8")
    return json.loads(text).get("position") or {}


def _rewards(noted: Any, tasks: str) -> Mapping[str, Mapping[str, float]]:
    """The rewards of a set by mode in a checkpoint's position; those of earlier versions have fewer layers."""
    content = (noted or {}).get("rewards", noted) or {}
    return content if tasks == HELD_OUT else content.get("further", {}).get(tasks, {})


def _same(first: float | None, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    return isinstance(second, int | float) and math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-6)
