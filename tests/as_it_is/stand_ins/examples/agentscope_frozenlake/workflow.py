"""Stands for the workflow of Trinity-RFT's example `agentscope_frozenlake`: its imports and calls, in ours."""

from __future__ import annotations

from typing import List, Optional  # noqa: UP035 - as there

from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task, Workflow


class FrozenLakeWorkflow(Workflow):
    """A walk over the lake; the sum of its rewards is the reward of every call."""

    can_reset: bool = False
    is_async: bool = True
    can_repeat: bool = False

    def __init__(self, model: ModelWrapper, task: Task, auxiliary_models: Optional[List] = None):  # noqa: UP006, UP045
        super().__init__(model=model, task=task, auxiliary_models=auxiliary_models)
        from agentscope.model import OpenAIChatModel
        from examples.agentscope_frozenlake.agent import FrozenLakeAgent
        from examples.agentscope_frozenlake.env import FrozenLakeEnv

        arguments, row = task.workflow_args, task.raw_task
        self.agent_max_steps = arguments.get("agent_max_steps", 10)
        chat_model = OpenAIChatModel(
            api_key="EMPTY", model_name=model.model_path, generate_kwargs=self.rollout_args, stream=False
        )
        chat_model.client = self.model.get_openai_async_client()
        self.agent = FrozenLakeAgent(model=chat_model, max_steps=self.agent_max_steps)
        self.env = FrozenLakeEnv(
            max_steps=arguments.get("env_max_steps", 8),
            desc=arguments.get("desc"),
            is_slippery=arguments.get("is_slippery", False),
            size=row.get("size", 1),
            p=row.get("p", 0.8),
            seed=row.get("seed", 42),
        )

    @property
    def rollout_args(self):
        return {"temperature": self.task.rollout_args.temperature, "max_tokens": self.task.rollout_args.max_tokens}

    async def run_async(self) -> List[Experience]:  # noqa: UP006 - as there
        observation, _ = self.env.reset(self.task.raw_task)
        rewards, done = [], False
        while not done and len(rewards) < self.agent_max_steps:
            action = await self.agent.step(current_observation=observation)
            observation, reward, done, _ = self.env.step(action)
            rewards.append(reward)
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = sum(rewards)
            experience.info["terminate_reason"] = "success" if done else "max_steps_reached"
        experiences[-1].metrics = {"env_steps": len(rewards), "env_done": int(done)}
        return experiences
