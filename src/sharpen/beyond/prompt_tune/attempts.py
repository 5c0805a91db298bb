"""Tries prompts on tasks, each prompt on each task once, however often the optimizer asks.

In: prompts and tasks, from any thread. Out: results of the rollout runner, and their scores for the optimizer.

An optimizer needs a number for every task. A failure of the agent scores the worst reward of the initial prompt, at
most 0. A task that something else made fail scores what the initial prompt got on it, which favours neither prompt.
`trials.results` has the rule for the final comparison.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from sharpen.agent.rollout.choices import returned_text
from sharpen.agent.rollout.in_process import OpenModels
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.beyond.trials.results import Measured, Pending, Result, floor_of
from sharpen.errors import RolloutError, SharpenError
from sharpen.types import Task

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
