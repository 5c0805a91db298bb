"""AgentScope 2's Agent, real, on our model: tools and their permission, injected time, limits, structured output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from agent_scripts import ADD, add_then_answer, call, turns
from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.message import UserMsg
from agentscope.model import ChatModelBase, OpenAIChatModel
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit
from framework_checks import check_parallel_rollouts
from pydantic import BaseModel, Field

from sharpen import WorkflowOutput
from sharpen.learning.experience.merge import merge
from sharpen.types import Call, CallStatus, Outcome


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


def agent_for(model: OpenAIChatModel, *, mode: PermissionMode = PermissionMode.BYPASS, **options: Any) -> Agent:
    return Agent(
        name="friday",
        system_prompt="You are a helpful math problem solving agent.",
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(add)]),
        state=AgentState(permission_context=PermissionContext(mode=mode)),
        **options,
    )


def question(text: str) -> UserMsg:
    return UserMsg(name="user", content=text)


def solve(**options: Any) -> Any:
    """A workflow: the agent answers the task's question; the reward is whether the answer is in its text."""

    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        answer = await agent_for(model, **options).reply(question(task.get("question", "2+3")))
        return WorkflowOutput(reward=float(task.get("answer", "5") in (answer.get_text_content() or "")))

    return workflow


def calls_of(rollouts: Any, workflow: Any) -> tuple[Call, ...]:
    (group,) = rollouts.run(workflow)
    (rollout,) = group.rollouts
    assert rollout.outcome == Outcome.OK, rollout.error
    assert all(each.status == CallStatus.USED for each in rollout.calls)
    return rollout.calls


def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        assert isinstance(model, OpenAIChatModel)
        assert isinstance(model, ChatModelBase)
        assert (model.stream, model.max_retries, model.model) == (False, 0, "toy")
        answer = await agent_for(model).reply(question("2+3"))
        return WorkflowOutput(reward=float("The answer is 5." in answer.get_text_content()))

    (group,) = rollouts(add_then_answer).run(workflow)
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert [each.parent for each in rollout.calls] == [None, 0]
    assert "add" in [tool["function"]["name"] for tool in rollout.calls[0].tools]
    assert len(merge(rollout)) == 1
    assert "friday" not in capfd.readouterr().out


def test_the_current_time_is_in_the_prompt_unless_switched_off(rollouts: Any) -> None:
    (with_time,) = calls_of(rollouts("5"), solve())
    (without,) = calls_of(rollouts("5"), solve(injection_config=InjectionConfig(inject_runtime_state=False)))
    assert "current-time" in str(with_time.messages)
    assert "current-time" not in str(without.messages)


def test_without_permission_no_tool_runs(rollouts: Any) -> None:
    """A rollout has nobody to ask. DONT_ASK denies the call and the agent goes on; the default mode ends the reply."""
    calls = calls_of(rollouts(turns(ADD, "I may not.")), solve(mode=PermissionMode.DONT_ASK))
    assert len(calls) == 2
    assert not [message for message in calls[1].messages if message["role"] == "tool" and message["content"] == "5"]
    assert len(calls_of(rollouts(turns(ADD, "I may not.")), solve(mode=PermissionMode.DEFAULT))) == 1


def test_max_completion_tokens_and_temperature_of_the_user_reach_the_model(rollouts: Any) -> None:
    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        model.parameters.max_tokens = 7
        model.parameters.temperature = 0.25
        await agent_for(model).reply(question("2+3"))
        return WorkflowOutput(reward=1.0)

    (only,) = calls_of(rollouts("5"), workflow)
    assert (only.sampling.max_tokens, only.sampling.temperature) == (7, 0.25)


def test_max_iters_ends_the_reply(rollouts: Any) -> None:
    calls = calls_of(rollouts(ADD), solve(react_config=ReActConfig(max_iters=2)))
    assert [each.parent for each in calls[:2]] == [None, 0]


class Answer(BaseModel):
    """What the agent must return."""

    result: int = Field(description="The number.")


def test_structured_output_of_the_model(rollouts: Any) -> None:
    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        response = await model.generate_structured_output([question("2+3")], structured_model=Answer)
        return WorkflowOutput(reward=float(response.content["result"]))

    (group,) = rollouts(call("generate_structured_output", '{"result": 5}')).run(workflow)
    assert [rollout.reward for rollout in group.rollouts] == [5.0]


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, solve(), tasks=8)


def test_a_copied_model_is_the_same_model(rollouts: Any) -> None:
    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        twin = copy.deepcopy(model)
        twin.parameters.temperature = 0.5
        assert twin.client is model.client
        for each in (twin, model, copy.copy(model)):
            await agent_for(each).reply(question("2+3"))
        return WorkflowOutput(reward=1.0)

    calls = calls_of(rollouts("5"), workflow)
    assert [each.sampling.temperature for each in calls] == [0.5, 1.0, 1.0]
