"""Compares the best prompt with the initial one on held-out tasks.

In: attempts and tasks. Out: a `Comparison`: the prompt to use, figures, text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sharpen.beyond.prompt_tune.attempts import PromptAttempts, text_of_answer
from sharpen.beyond.trials.results import Measured, floor_of
from sharpen.errors import RolloutError
from sharpen.show.monitor.figures import signed, with_interval
from sharpen.show.monitor.statistics import accuracy, is_binary, paired_difference
from sharpen.show.monitor.table import shortened
from sharpen.show.monitor.verdict import MIN_TASKS
from sharpen.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The results of the `initial` and the `best` prompt. `before` is None if only the best one was evaluated, `after`
    if neither was. A failure counts `floor`."""

    initial: str
    best: str
    before: Measured | None
    after: Measured | None
    floor: float

    @property
    def rewards(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """The rewards by task id of both prompts, on the tasks that both have if both were evaluated."""
        after = {} if self.after is None else self.after.rewards(self.floor)
        if self.before is None:
            return {}, after
        before = self.before.rewards(self.floor)
        common = before.keys() & after.keys()
        return {task: before[task] for task in before if task in common}, {
            task: after[task] for task in before if task in common
        }

    @property
    def prompt(self) -> str:
        """The best prompt, unless it is shown to be worse than the initial one."""
        before, after = self.rewards
        worse = len(before) >= MIN_TASKS and paired_difference(before, after).high < 0.0
        return self.initial if worse else self.best

    def figures(self) -> dict[str, float]:
        """Return the figures for `tune_prompt()`."""
        before, after = self.rewards
        if not after:
            return {}
        figures = {"after": accuracy(after.values()).accuracy, "num_tasks": float(len(after))}
        if not before:
            return figures
        found = paired_difference(before, after)
        figures["before"] = accuracy(before.values()).accuracy
        figures["valset_improvement"] = _percent(figures["before"], found.difference)
        return figures | {"difference": found.difference, "low": found.low, "high": found.high}

    def lines(self, num_rows: int, width: int) -> list[str]:
        """Return text: both prompts with intervals, what failed, the first `num_rows` tasks, and the prompt to use.
        A row of the table has at most `width` columns."""
        before, after = self.rewards
        if self.after is None:
            return [f"prompt: {self.prompt}"]
        among = {*before.values(), *after.values()}
        kind = "accuracy" if is_binary(among) else "reward"
        mean = with_interval(accuracy(after.values(), among=among))
        lines = [f"held-out {kind} of the best prompt: {mean} ({len(after)} tasks)"]
        lines += [f"  {line}" for line in self.after.lines(self.floor)]
        if self.before is not None:
            lines.append(
                f"held-out {kind} of the initial prompt: {with_interval(accuracy(before.values(), among=among))}"
            )
            lines += [f"  {line}" for line in self.before.lines(self.floor)]
            lines.append(self._verdict(before, after))
        return [*lines, *self._table(num_rows, width), f"prompt: {self.prompt}"]

    def _verdict(self, before: Mapping[str, float], after: Mapping[str, float]) -> str:
        if self.best == self.initial:
            return "no prompt did better than the initial one on the validation tasks: it is returned"
        found = paired_difference(before, after)
        shown = signed(found)
        if found.num_tasks < MIN_TASKS:
            return f"{found.num_tasks} held-out tasks are too few to say more (at least {MIN_TASKS}): {shown}"
        if found.low > 0.0:
            return f"better by {shown}"
        return (
            f"worse: {shown}; the initial prompt is returned"
            if found.high < 0.0
            else f"not shown to be better: {shown}"
        )

    def _table(self, num_rows: int, width: int) -> list[str]:
        assert self.after is not None
        before, after = self.rewards
        rows = []
        for id_ in list(after)[:num_rows]:
            was = f"{before[id_]:.3f} -> " if id_ in before else ""
            answer = " ".join(text_of_answer(self.after.results[id_]).split())
            rows.append(shortened(f"  {id_}: {was}{after[id_]:.3f}  {answer}", width))
        return rows


def compare(attempts: PromptAttempts, best: str, tasks: Sequence[Task], *, both: bool) -> Comparison:
    """Evaluate the best prompt on held-out tasks, and the initial one too if `both`. Raises `RolloutError` if no task
    has a result of each."""
    after = attempts.measure(best, tasks) if tasks else None
    before = attempts.measure(attempts.initial, tasks) if tasks and both else None
    measured = [one for one in (before, after) if one is not None]
    found = Comparison(initial=attempts.initial, best=best, before=before, after=after, floor=floor_of(measured))
    if tasks and not found.rewards[1]:
        line = next(line for one in measured for line in one.lines(0.0))
        raise RolloutError(f"the prompts cannot be compared: no held-out task has a result of both; {line}")
    return found


def _percent(before: float, difference: float) -> float:
    """Return a difference in percent of `before`; infinite if that is 0."""
    if difference == 0.0:
        return 0.0
    return math.copysign(math.inf, difference) if before == 0.0 else 100.0 * difference / abs(before)
