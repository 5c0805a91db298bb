"""The workflow of the ReAct guide: AgentScope's `ReActAgent` solves a task with our client in its model.

In: a task with a question and a truth. Out: the experiences of all the agent's calls, with the reward of its answer.
AgentScope is imported when the workflow is constructed, not before.
"""

from __future__ import annotations

import importlib
from typing import Any

from pydantic import BaseModel, Field

from sharpen.compat.agentscope.console import silence
from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.rewards import MathBoxedRewardFn, total
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import Workflow
from sharpen.errors import ConfigError

GSM8K_PROMPT = (
    "You solve math problems, with tools where they help. Work the problem out step by step, check your result, and "
    "return the final answer within \\boxed{}."
)


class BoxedResult(BaseModel):
    """What the agent answers with."""

    result: str = Field(description="The solution of the problem, with the final answer in a box: \\boxed{42}")


class AgentScopeReActAgent:
    """AgentScope's `ReActAgent`, whose model calls go through `openai_client`.

    Raises `ConfigError` if AgentScope is not installed, or is not of the 1.x line.
    """

    def __init__(
        self,
        *,
        openai_client: Any,
        model_name: str,
        system_prompt: str,
        generate_kwargs: dict[str, Any],
        response_structure: type[BaseModel],
        max_iters: int = 10,
        toolkit: Any = None,
    ) -> None:
        parts = {
            name: _agentscope(module, name)
            for module, name in (
                ("agent", "ReActAgent"),
                ("formatter", "OpenAIChatFormatter"),
                ("model", "OpenAIChatModel"),
                ("message", "Msg"),
            )
        }
        self.agent_model = parts["OpenAIChatModel"](
            model_name=model_name, api_key="unused", stream=False, generate_kwargs=generate_kwargs
        )
        self.agent_model.client = openai_client
        self.response_structure = response_structure
        self._message = parts["Msg"]
        self.agent = parts["ReActAgent"](
            name="react_agent",
            sys_prompt=system_prompt,
            model=self.agent_model,
            formatter=parts["OpenAIChatFormatter"](),
            toolkit=toolkit,
            enable_meta_tool=True,
            max_iters=max_iters,
        )
        silence(self.agent)

    async def reply(self, query: str) -> dict[str, Any]:
        """The agent's structured answer; empty if it gave none."""
        message = self._message("user", query, role="user")
        answer = await self.agent.reply(message, structured_model=self.response_structure)
        return dict(answer.metadata or {})


class AgentScopeReActWorkflow(Workflow):
    """AgentScope's ReAct agent on problems with a boxed answer (GSM8K).

    `workflow_args`: `type` (`gsm8k`, the only one), `max_iters`. The reward function is `task_args.reward_fn`, by
    default `MathBoxedRewardFn`.
    """

    is_async = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        kind = task.workflow_args.get("type", "gsm8k")
        if kind != "gsm8k":
            raise ConfigError(f"workflow_args.type is {kind!r}, but AgentScopeReActWorkflow knows 'gsm8k' only")
        self.query = task.raw_task[task.format_args.prompt_key]
        self.answer = task.raw_task[task.format_args.response_key]
        self.reward_fn = (task.reward_fn or MathBoxedRewardFn)(**task.reward_fn_args)
        sampling = {"temperature": task.rollout_args.temperature, "max_tokens": task.rollout_args.max_tokens}
        self.agent = AgentScopeReActAgent(
            openai_client=model.get_openai_async_client(),
            model_name=model.model_path,
            system_prompt=task.format_args.system_prompt or GSM8K_PROMPT,
            generate_kwargs={name: value for name, value in sampling.items() if value is not None},
            response_structure=BoxedResult,
            max_iters=int(task.workflow_args.get("max_iters", 10)),
        )

    async def run_async(self) -> list[Experience]:
        """Solve, score, and give every call of the agent the reward."""
        response = await self.agent.reply(self.query)
        reward = await self.calculate_reward(response)
        return self.construct_experiences(reward)

    async def calculate_reward(self, response: dict[str, Any]) -> Any:
        """The scores of the agent's result, or a number."""
        return self.reward_fn(response=response.get("result", ""), truth=self.answer)

    def construct_experiences(self, reward: Any) -> list[Experience]:
        """The experiences of all calls, with the sum of the scores as reward and each score as a metric."""
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = total(reward)
            experience.metrics = dict(reward) if isinstance(reward, dict) else {}
        return experiences


def _agentscope(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"agentscope.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"AgentScopeReActWorkflow needs AgentScope 1.x ({name} of agentscope.{module}): "
            f'pip install "agentscope>=1.0.4,<2" ({error})'
        ) from error
