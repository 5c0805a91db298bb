"""Trinity's workflow bases for agents that act step by step: a reward for each step, or one for all of them.

In: what a subclass writes: `step` (or `step_async`), `reward`, `max_step_num`. Out: the experiences of all steps. A
reward of a step is noted as such (`info["step_reward"]`), once, however many calls the step made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import Workflow

if TYPE_CHECKING:
    from openai import OpenAI


class _SteppedWorkflow(Workflow):
    """What both kinds share. `self.client` is the model's `openai.OpenAI`, None with `use_openai_client=False`."""

    client: OpenAI | None

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
        use_openai_client: bool = True,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_client() if use_openai_client else None

    def step(self, step_num: int) -> bool:
        """Do one step; whether to go on with another."""
        raise NotImplementedError

    async def step_async(self, step_num: int) -> bool:
        """As `step`, in the asynchronous classes."""
        raise NotImplementedError

    @property
    def max_step_num(self) -> int:
        """Steps at most."""
        raise NotImplementedError

    def _experiences_of(self, step_num: int) -> list[Experience]:
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.eid.step = step_num
        return experiences


class StepWiseRewardWorkflow(_SteppedWorkflow):
    """A reward for each step: `reward(exps, step_num)` scores the calls that the step made."""

    def run(self) -> list[Experience]:
        """Step until `step` says that it is over, at most `max_step_num` times."""
        experiences: list[Experience] = []
        for step_num in range(self.max_step_num):
            goes_on = self.step(step_num=step_num)
            made = self._experiences_of(step_num)
            _note_step(experiences, _give(made, reward := self.reward(made, step_num=step_num)), reward)
            experiences += made
            if not goes_on:
                break
        return experiences

    def reward(self, exps: list[Experience], step_num: int) -> float:
        """The reward of one step."""
        raise NotImplementedError


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    """As `StepWiseRewardWorkflow`, with `step_async` and `reward_async`."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Step until `step_async` says that it is over, at most `max_step_num` times."""
        experiences: list[Experience] = []
        for step_num in range(self.max_step_num):
            goes_on = await self.step_async(step_num=step_num)
            made = self._experiences_of(step_num)
            _note_step(experiences, _give(made, reward := await self.reward_async(made, step_num=step_num)), reward)
            experiences += made
            if not goes_on:
                break
        return experiences

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """The reward of one step."""
        raise NotImplementedError


class RewardPropagationWorkflow(_SteppedWorkflow):
    """One reward for all steps: `reward(exps)` scores the whole run. The metric `actual_env_steps` counts its steps."""

    def run(self) -> list[Experience]:
        """Step until `step` says that it is over, at most `max_step_num` times, then score."""
        experiences: list[Experience] = []
        num_steps = 0
        for step_num in range(self.max_step_num):
            goes_on = self.step(step_num=step_num)
            experiences += self._experiences_of(step_num)
            num_steps += 1
            if not goes_on:
                break
        return _give(experiences, self.reward(experiences), actual_env_steps=num_steps)

    def reward(self, exps: list[Experience]) -> float:
        """The reward of the whole run."""
        raise NotImplementedError


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    """As `RewardPropagationWorkflow`, with `step_async` and `reward_async`."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Step until `step_async` says that it is over, at most `max_step_num` times, then score."""
        experiences: list[Experience] = []
        num_steps = 0
        for step_num in range(self.max_step_num):
            goes_on = await self.step_async(step_num=step_num)
            experiences += self._experiences_of(step_num)
            num_steps += 1
            if not goes_on:
                break
        return _give(experiences, await self.reward_async(experiences), actual_env_steps=num_steps)

    async def reward_async(self, exps: list[Experience]) -> float:
        """The reward of the whole run."""
        raise NotImplementedError


def _note_step(earlier: list[Experience], made: list[Experience], reward: float) -> None:
    """Note the reward of a step on the last call so far, unless the subclass did: the last that the step `made`, or
    where it made none the one before it."""
    if any("step_reward" in experience.info for experience in made):
        return
    if made:
        made[-1].info["step_reward"] = made[-1].reward
    elif earlier:
        earlier[-1].info["step_reward"] = earlier[-1].info.get("step_reward", 0.0) + reward


def _give(experiences: list[Experience], reward: float, **metrics: Any) -> list[Experience]:
    """Set the same reward, and further metrics, on all of them."""
    for experience in experiences:
        experience.reward = reward
        experience.metrics.update(metrics)
    return experiences
