"""Searches with DSPy's MIPROv2: it proposes instructions from tasks and good answers, then searches among them on the
validation tasks. Import this module only where DSPy is installed.

In: `PromptAttempts`, and the tasks to propose from. Out: nothing; the attempts keep the results. No demonstrations are
put into the prompt, because the agent owns the format of its conversation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import dspy
import optuna

from sharpen.beyond.prompt_tune.comparison import PromptAttempts, text_of_answer, text_of_task
from sharpen.types import Task

MINIBATCH = 35
"""Validation tasks of one trial if there are more than `MINIBATCH_FROM`. Every fifth trial uses all of them."""
MINIBATCH_FROM = 50


class Agent(dspy.Module):  # type: ignore[misc]  # a class of a package without types
    """The user's agent as a program of DSPy: one predictor, whose instructions are the system prompt."""

    def __init__(self, attempts: PromptAttempts, tasks: Sequence[Task]) -> None:
        super().__init__()
        self.prompt = dspy.Predict(dspy.Signature("task -> answer", attempts.initial))
        self.attempts = attempts
        self.tasks = {task.id: task for task in tasks}

    def forward(self, task: str, id: str) -> Any:
        """Run the current instructions on a task."""
        instructions = self.prompt.signature.instructions
        initial = self.attempts.initial
        prompt = initial if instructions.split() == initial.split() else instructions  # DSPy removes indentation
        result = self.attempts.result(prompt, self.tasks[id])
        prediction = dspy.Prediction(answer=text_of_answer(result), score=self.attempts.score(result))
        if dspy.settings.trace is not None:  # the examples that the proposing model reads
            dspy.settings.trace.append((self.prompt, {"task": task}, dspy.Prediction(answer=prediction.answer)))
        return prediction


def search(
    attempts: PromptAttempts, training: Sequence[Task], lm: Any, *, num_candidates: int, num_threads: int, seed: int
) -> None:
    """Propose prompts and try them. Raises the errors of the proposing model."""

    def metric(example: Any, prediction: Any, trace: Any = None) -> Any:
        return prediction.score if trace is None else attempts.is_good(prediction.score)

    optimizer = dspy.MIPROv2(
        metric=metric,
        prompt_model=lm,
        task_model=lm,
        teacher_settings={"lm": lm},
        auto=None,
        num_candidates=num_candidates,
        max_bootstrapped_demos=0,
        max_labeled_demos=0,
        num_threads=num_threads,
        seed=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optimizer.compile(
            Agent(attempts, [*training, *attempts.validation]),
            trainset=_examples(training),
            valset=_examples(attempts.validation),
            num_trials=int(max(2 * math.log2(num_candidates), 1.5 * num_candidates)),
            minibatch=len(attempts.validation) > MINIBATCH_FROM,
            minibatch_size=min(MINIBATCH, len(attempts.validation)),
            program_aware_proposer=False,  # it would read the class above, not the agent
        )


def _examples(tasks: Sequence[Task]) -> list[Any]:
    return [dspy.Example(task=text_of_task(task), id=task.id).with_inputs("task", "id") for task in tasks]
