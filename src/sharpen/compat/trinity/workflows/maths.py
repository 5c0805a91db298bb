"""Trinity's workflows of mathematics beside the simple ones: evaluation as Qwen2.5-Math does it, and a reward model.

In: a `Task` whose row holds a question and a truth. Out: one experience, scored.
"""

from __future__ import annotations

import re
from typing import Any

from sharpen.compat.trinity.equality import require_math_verify, says
from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.rewards import last_boxed, total, truth_in
from sharpen.compat.trinity.simple import BOXED, SimpleWorkflow
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import Workflow, each_alone
from sharpen.errors import ConfigError

SAMPLING = {"temperature": 0.6, "top_p": 0.8, "n": 1}
"""What the evaluation of Qwen2.5-Math asks with."""
_STATED = re.compile(r"(?:(?:final|the)\s+answer\s+is|答案是)\s*[:：]?\s*(.+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r".*?([-+]?\d*\.?\d+)(?!.*\d)", re.DOTALL)


class MathEvalWorkflow(Workflow):
    """The row's `question`, asked for a boxed answer; the reward, and the metric `accuracy`, is whether it is right.

    The answer is what the last box holds, else what follows "the answer is", else the last number. It samples with a
    `top_p` of its own, so it is for evaluation: nothing can be trained on it.
    """

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        require_math_verify()
        self.raw_task, self.truth = task.raw_task, task.truth

    def format_messages(self) -> list[dict[str, Any]]:
        """A plain system prompt, and the question with how to answer it."""
        question = {"role": "user", "content": f"{self.raw_task['question']}\n{BOXED}"}
        return [{"role": "system", "content": "You are a helpful assistant."}, question]

    def run(self) -> list[Experience]:
        """Ask and score."""
        return self._scored(self.model.chat(self.format_messages(), **SAMPLING))

    def _scored(self, experiences: list[Experience]) -> list[Experience]:
        for experience in experiences:
            found = answer_said(experience.response_text)
            experience.reward = float(found is not None and says(found, truth_in(self.truth)))
            experience.metrics["accuracy"] = experience.reward
        return experiences


class AsyncMathEvalWorkflow(MathEvalWorkflow):
    """As `MathEvalWorkflow`, asynchronous."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Ask and score."""
        return self._scored(await self.model.chat_async(self.format_messages(), **SAMPLING))


class MathRMWorkflow(SimpleWorkflow):
    """One question, one answer, scored by a reward model of the user's own.

    `task_args.reward_fn` is called with the experience, the messages that were asked, and `ground_truth`.
    """

    def reset(self, task: Task) -> None:
        """Read the task. Raises `ConfigError` without a reward function."""
        if task.reward_fn is None:
            raise ConfigError(
                f"{type(self).__name__} needs a reward function of your own: set task_args.reward_fn to "
                "package.module:Class, whose objects are called with (experience, messages, ground_truth=...)"
            )
        super().reset(task)

    @each_alone
    def run(self) -> list[Experience]:
        """Ask and score."""
        messages = self.format_messages()
        return self._judged(self.model.chat(messages, **self.rollout_args), messages)

    def _judged(self, experiences: list[Experience], messages: list[dict[str, Any]]) -> list[Experience]:
        for number, experience in enumerate(experiences):
            scores = self.reward_fn(experience, messages, ground_truth=self.truth)
            experience.reward = total(scores)
            experience.metrics.update(scores if isinstance(scores, dict) else {})
            experience.eid.run = number + self.run_id_base
        return experiences


class AsyncMathRMWorkflow(MathRMWorkflow):
    """As `MathRMWorkflow`, asynchronous."""

    is_async = True

    @each_alone
    async def run_async(self) -> list[Experience]:
        """Ask and score."""
        messages = self.format_messages()
        return self._judged(await self.model.chat_async(messages, **self.rollout_args), messages)


def answer_said(text: str) -> str | None:
    """The answer in a solution: its last box, else what it says that the answer is, else its last number."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    stated = _STATED.search(text)
    if stated is not None:
        return stated.group(1).strip().removesuffix(".")
    number = _LAST_NUMBER.match(text.replace(",", ""))
    return number.group(1) if number is not None else None
