"""AgentScope's `ReActAgent` with our client in its model, and the workflow of the ReAct guide, an agent at a task.

In: a task with a question and a truth. Out: the experiences of all the agent's calls, with the reward of its answer.
AgentScope is imported when the workflow is constructed, not before.
"""

from __future__ import annotations

import importlib
from typing import Any

from pydantic import BaseModel, Field

from sharpen.agent.agentscope.console import silence
from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.registry import AGENTSCOPE
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
        self.response_structure = response_structure
        self.agent = react_agent(
            "react_agent",
            system_prompt,
            client=openai_client,
            model_name=model_name,
            sampling=generate_kwargs,
            toolkit=toolkit,
            max_iters=max_iters,
            enable_meta_tool=True,
        )
        self.agent_model = self.agent.model

    async def reply(self, query: str) -> dict[str, Any]:
        """The agent's structured answer; empty if it gave none."""
        answer = await self.agent.reply(user_message(query), structured_model=self.response_structure)
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
        self.agent = AgentScopeReActAgent(
            openai_client=model.get_openai_async_client(),
            model_name=model.model_path,
            system_prompt=task.format_args.system_prompt or GSM8K_PROMPT,
            generate_kwargs=sampling_of(task),
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
            experience.metrics = {"react_memory_length": len(self.agent.agent.memory.content)}
            experience.metrics |= reward if isinstance(reward, dict) else {}
        return experiences


def react_agent(
    name: str,
    system_prompt: str,
    *,
    client: Any,
    model_name: str,
    sampling: dict[str, Any],
    toolkit: Any = None,
    max_iters: int = 10,
    enable_meta_tool: bool = False,
) -> Any:
    """An AgentScope `ReActAgent` that prints nothing, whose model calls go through the OpenAI client `client`.

    Raises `ConfigError` if AgentScope is not installed, or is not of the 1.x line.
    """
    model = agentscope("model", "OpenAIChatModel")(
        model_name=model_name, api_key="unused", stream=False, generate_kwargs=sampling
    )
    model.client = client
    agent = agentscope("agent", "ReActAgent")(
        name=name,
        sys_prompt=system_prompt,
        model=model,
        formatter=agentscope("formatter", "OpenAIChatFormatter")(),
        toolkit=toolkit,
        enable_meta_tool=enable_meta_tool,
        max_iters=max_iters,
    )
    silence(agent)
    return agent


def user_message(text: str) -> Any:
    """AgentScope's message of a user."""
    return agentscope("message", "Msg")("user", text, role="user")


def said(message: Any) -> str:
    """What an agent's message answers: its structured `result`, else its text."""
    metadata = message.metadata
    if isinstance(metadata, dict) and "result" in metadata:
        return str(metadata["result"])
    return str(message.get_text_content() or "")


def sampling_of(task: Task) -> dict[str, Any]:
    """The sampling settings of the task that an agent's calls pass on; the model's own hold for the others."""
    given = {"temperature": task.rollout_args.temperature, "max_tokens": task.rollout_args.max_tokens}
    return {name: value for name, value in given.items() if value is not None}


def agentscope(module: str, name: str) -> Any:
    """A name of a module of AgentScope 1.x. Raises `ConfigError` without it."""
    try:
        return getattr(importlib.import_module(f"agentscope.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"AgentScope's agents need AgentScope 1.x ({name} of agentscope.{module}): {AGENTSCOPE.install} ({error})"
        ) from error
