"""Compares the best prompt with the initial one on held-out tasks.

In: attempts and tasks. Out: a `Comparison`: the prompt to use, figures, text.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sharpen.agent.rollout.choices import returned_text
from sharpen.agent.rollout.in_process import OpenModels
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.beyond.trials.ranking import Measured, Pending, Result, floor_of
from sharpen.errors import RolloutError, SharpenError
from sharpen.show.monitor.figures import signed, with_interval
from sharpen.show.monitor.statistics import accuracy, is_binary, paired_difference
from sharpen.show.monitor.table import shortened
from sharpen.show.monitor.verdict import MIN_TASKS
from sharpen.types import Task

# Tries prompts on tasks, each prompt on each task once, however often the optimizer asks.
#
# In: prompts and tasks, from any thread. Out: results of the rollout runner, and their scores for the optimizer.
#
# An optimizer needs a number for every task. A failure of the agent scores the worst reward of the initial prompt, at
# most 0. A task that something else made fail scores what the initial prompt got on it, which favours neither prompt.
# `trials.ranking` has the rule for the final comparison.

MAX_TEXT = 4000
"""The most characters of a task or an answer in a prompt of the proposing model."""


class PromptAttempts:
    """Runs prompts on tasks and keeps the results. `opens_for` returns the opener of a prompt's models; `begin`
    measures the `initial` prompt on the `validation` tasks."""

    def __init__(
        self,
        runner: RolloutRunner,
        opens_for: Callable[[str], OpenModels],
        initial: str,
        validation: Sequence[Task],
    ) -> None:
        self.initial, self.validation = initial, validation
        self.broken: SharpenError | None = None
        """The error that makes every attempt useless, once one has occurred."""
        self._runner = runner
        self._opens_for = opens_for
        self._pending: dict[tuple[str, str], Pending] = {}
        self._lock = threading.Lock()
        self._floor = 0.0
        self._neutral: dict[str, float] = {}
        self._mean = 0.0

    def begin(self) -> None:
        """Measure the initial prompt. Raises `RolloutError` if no task has a reward."""
        measured = self.measure(self.initial, self.validation)
        if not measured.given:
            line = (measured.lines(0.0) or ["no task was tried"])[0]
            raise RolloutError(f"the initial prompt gives no result, so that nothing can be compared with it: {line}")
        self._floor = floor_of([measured])
        self._neutral = measured.rewards(self._floor)
        self._mean = fmean(self._neutral.values())

    def is_good(self, score: float) -> bool:
        """Return whether a score is at least the initial prompt's mean, and above its lowest score."""
        return score >= self._mean and score > min(self._neutral.values())

    def result(self, prompt: str, task: Task) -> Result:
        """Return the result of a prompt on a task, running it the first time. Raises `broken` if it is set."""
        if self.broken is not None:
            raise self.broken
        try:
            return self._start(prompt, task).result()
        except SharpenError as error:
            self.broken = self.broken or error
            raise

    def results(self, prompt: str, tasks: Sequence[Task]) -> list[Result]:
        """Return the results of a prompt on tasks, run concurrently; a task may occur twice. Raises as `result`."""
        for task in tasks:
            self._start(prompt, task)
        return [self.result(prompt, task) for task in tasks]

    def measure(self, prompt: str, tasks: Sequence[Task]) -> Measured:
        """Run a prompt on tasks concurrently. Raises as `result`."""
        return Measured(results={result.task.id: result for result in self.results(prompt, tasks)})

    def score(self, result: Result) -> float:
        """Return the score of a result for the optimizer."""
        if result.reward is not None:
            return result.reward
        return self._floor if result.failed else self._neutral.get(result.task.id, self._mean)

    def measured(self) -> list[tuple[str, Measured]]:
        """Return the prompts that were tried on all validation tasks, in order, with their results."""
        with self._lock:
            prompts = list(dict.fromkeys(prompt for prompt, _ in self._pending))
            done = {prompt: [self._pending.get((prompt, task.id)) for task in self.validation] for prompt in prompts}
        complete = {prompt: [one for one in some if one is not None] for prompt, some in done.items() if all(some)}
        return [
            (prompt, Measured(results={found.task.id: found for found in (one.result() for one in pending)}))
            for prompt, pending in complete.items()
        ]

    @property
    def num_prompts(self) -> int:
        """The number of prompts that were tried on any task."""
        with self._lock:
            return len({prompt for prompt, _ in self._pending})

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptAttempts:
        """Return itself: DSPy copies the program that holds it."""
        return self

    def _start(self, prompt: str, task: Task) -> Pending:
        with self._lock:
            key = (prompt, task.id)
            if key not in self._pending:
                self._pending[key] = Pending(self._runner, task, self._opens_for(prompt))
            return self._pending[key]


def text_of_task(task: Task) -> str:
    """Return a task as text for the proposing model."""
    return json.dumps(dict(task.row), ensure_ascii=False, default=str)[:MAX_TEXT]


def text_of_answer(result: Result) -> str:
    """Return the agent's answer as text for the proposing model."""
    response = None if result.trial is None else result.trial.response
    text = returned_text(response)
    return (text if text is not None else "" if response is None else str(response))[:MAX_TEXT]


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
