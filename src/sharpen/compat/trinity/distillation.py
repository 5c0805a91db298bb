"""Trinity's workflows of distillation: ask the question; what the teacher says of the answer, the trainer finds out.

In: a `Task` whose row holds the question (and a truth). Out: one experience. Its reward is no part of what is learnt:
0, or whether the answer is right, to be looked at and evaluated.
"""

from __future__ import annotations

from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.rewards import MathBoxedRewardFn
from sharpen.compat.trinity.simple import BOXED, BaseSimpleWorkflow
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import each_alone
from sharpen.errors import ConfigError


class OnPolicyDistillWorkflow(BaseSimpleWorkflow):
    """One question, one answer. Subclasses may override `compute_reward`."""

    is_async = True
    can_reset = True
    can_repeat = True

    def reset(self, task: Task) -> None:
        """Read the task. Raises `ConfigError` for a temperature of the teacher's other than 1."""
        self._read(task)
        if (temperature := task.workflow_args.get("temperature", 1.0)) != 1.0:
            raise ConfigError(f"workflow_args.temperature is {temperature}: the teacher is compared with at 1 here")

    def compute_reward(self, response: Experience) -> float:
        """The answer's reward, which teaches nothing."""
        return 0.0

    @each_alone
    async def run_async(self) -> list[Experience]:
        """Ask."""
        experiences = await self.model.chat_async(self.format_messages(), **self.rollout_args)
        for number, experience in enumerate(experiences):
            experience.reward = self.compute_reward(experience)
            experience.eid.run = number + self.run_id_base
        return experiences


class OnPolicyDistillMathWorkflow(OnPolicyDistillWorkflow):
    """Questions whose answer comes in a box; the reward is whether it is right."""

    def format_messages(self) -> list[dict[str, Any]]:
        """The question, and how to answer it."""
        system = {"role": "system", "content": self.system_prompt or "You are a helpful assistant."}
        return [system, {"role": "user", "content": f"{self.task_desc}\n{BOXED}"}]

    def compute_reward(self, response: Experience) -> float:
        """1 for a right answer, else 0."""
        scores = MathBoxedRewardFn()(response=response.response_text, truth=self.truth)
        response.metrics["accuracy"] = scores["accuracy"]
        return float(scores["accuracy"] > 0)
