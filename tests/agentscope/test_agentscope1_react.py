"""AgentScope 1's ReActAgent, real, on our model: tools, meta tool, structured output, limits, parallel rollouts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from agent_scripts import ADD, add_then_answer, call, tool_results, turns
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase, OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse
from framework_checks import check_parallel_rollouts
from pydantic import BaseModel, Field

from sharpen import WorkflowOutput
from sharpen.learning.experience.merge import merge
from sharpen.types import Call, CallStatus, Outcome


def add(a: int, b: int) -> ToolResponse:
    """Add two numbers.

    Args:
        a (int): The first.
        b (int): The second.
    """
    return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])


def agent_for(model: OpenAIChatModel, *, tools: bool = True, **options: Any) -> ReActAgent:
    toolkit = Toolkit()
    if tools:
        toolkit.register_tool_function(add)
    return ReActAgent(
        name="friday",
        sys_prompt="You are a helpful math problem solving agent.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        **options,
    )


def solve(**options: Any) -> Any:
    """A workflow: the agent answers the task's question; options of the agent, and of its reply."""
    reply = {"structured_model": options.pop("structured_model")} if "structured_model" in options else {}

    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        answer = await agent_for(model, **options).reply(Msg("user", task.get("question", "2+3"), "user"), **reply)
        return WorkflowOutput(reward=1.0, response=answer)

    return workflow


def calls_of(rollouts: Any, workflow: Any) -> tuple[Call, ...]:
    (group,) = rollouts.run(workflow)
    (rollout,) = group.rollouts
    assert rollout.outcome == Outcome.OK, rollout.error
    assert all(each.status == CallStatus.USED for each in rollout.calls)
    return rollout.calls


def text_of(messages: Any) -> str:
    return " ".join(block["text"] for message in messages for block in message.get("content") or [] if "text" in block)


def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str | None] = []

    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        assert type(model).__mro__[2] is OpenAIChatModel
        assert isinstance(model, ChatModelBase)
        answer = await agent_for(model).reply(Msg("user", "2+3", "user"))
        said.append(answer.get_text_content())
        return WorkflowOutput(reward=1.0)

    calls = calls_of(rollouts(add_then_answer), workflow)
    assert said == ["The answer is 5."]
    assert [each.parent for each in calls] == [None, 0]
    assert [tool["function"]["name"] for tool in calls[0].tools] == ["add"]
    assert calls[0].tools == calls[1].tools
    assert calls[0].sampling.temperature == 1.0
    assert "friday" not in capfd.readouterr().out


def test_merged_calls_train_what_was_sampled(rollouts: Any) -> None:
    (group,) = rollouts(add_then_answer).run(solve())
    (rollout,) = group.rollouts
    (experience,) = merge(rollout)
    sampled = np.concatenate([each.sampled_ids_S for each in rollout.calls])
    assert np.array_equal(experience.ids_T[experience.loss_mask_T], sampled)


def test_trap_03_arguments_that_agentscope_writes_anew_go_on_as_sampled(rollouts: Any) -> None:
    spaced = call("add", '{"a":2,   "b":3}')
    calls = calls_of(rollouts(turns(spaced, "5")), solve())
    assert [each.parent for each in calls] == [None, 0]


def test_reasoning_that_agentscope_drops_starts_a_new_sequence(rollouts: Any) -> None:
    calls = calls_of(rollouts(turns(f"<think>\nlet me add\n</think>\n\n{ADD}", "5")), solve())
    assert [each.parent for each in calls] == [None, None]
    assert calls[0].response["reasoning_content"] == "let me add"


def test_a_later_reply_of_the_same_agent_goes_on(rollouts: Any) -> None:
    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        agent = agent_for(model, tools=False)
        for question in ("2+3", "and 1 more", "and 1 more"):
            await agent.reply(Msg("user", question, "user"))
        return WorkflowOutput(reward=1.0)

    assert [each.parent for each in calls_of(rollouts("it is 5"), workflow)] == [None, 0, 1]


def test_the_meta_tool_is_offered(rollouts: Any) -> None:
    calls = calls_of(rollouts("5"), solve(enable_meta_tool=True))
    assert {tool["function"]["name"] for tool in calls[0].tools} == {"add", "reset_equipped_tools"}


def test_without_tools_none_are_sent(rollouts: Any) -> None:
    (only,) = calls_of(rollouts("5"), solve(tools=False))
    assert only.tools == ()


class Answer(BaseModel):
    """What the agent must return."""

    result: int = Field(description="The number.")


def test_structured_output(rollouts: Any) -> None:
    metadata: list[Any] = []

    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        answer = await agent_for(model).reply(Msg("user", "2+3", "user"), structured_model=Answer)
        metadata.append(answer.metadata)
        return WorkflowOutput(reward=float(answer.metadata["result"]))

    (group,) = rollouts(turns(ADD, call("generate_response", '{"result": 5}'), "It is 5.")).run(workflow)
    (rollout,) = group.rollouts
    assert rollout.outcome == Outcome.OK, rollout.error
    assert metadata == [{"result": 5}]
    assert rollout.reward == 5.0
    assert [each.parent for each in rollout.calls] == [None, 0, None]  # the last one is asked for without tools


def test_the_hint_that_agentscope_takes_back_makes_the_prompt_fork(rollouts: Any) -> None:
    """Without a tool call, a hint asks for one; it is gone from the prompt after that."""
    script = turns("I will think.", call("generate_response", '{"result": 5}'), "It is 5.")
    calls = calls_of(rollouts(script), solve(structured_model=Answer))
    assert calls[1].parent == 0
    assert "Structured output is required" in text_of(calls[1].messages)
    assert "Structured output is required" not in text_of(calls[2].messages)
    assert calls[2].parent is None


def test_after_max_iters_one_more_call_without_tools(rollouts: Any) -> None:
    calls = calls_of(
        rollouts(lambda prompt: "I give up." if "maximum iterations" in prompt else ADD), solve(max_iters=2)
    )
    assert [len(each.tools) for each in calls] == [1, 1, 0]
    assert [each.parent for each in calls] == [None, 0, None]


def test_a_structured_call_of_the_model_itself(rollouts: Any) -> None:
    """AgentScope asks for a `response_format`, which is recorded with the call."""
    found: list[Any] = []

    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        for _ in range(2):
            response = await model([{"role": "user", "content": "2+3"}], structured_model=Answer)
            found.append(response.metadata)
        return WorkflowOutput(reward=1.0)

    calls = calls_of(rollouts('{"result": 5}'), workflow)
    assert found == [{"result": 5}] * 2
    assert [each.constraint.origin for each in calls if each.constraint] == ["response_format"] * 2


def test_parallel_tool_calls(rollouts: Any) -> None:
    script = turns(ADD + "\n" + call("add", '{"a": 10, "b": 20}'), "5 and 30")
    calls = calls_of(rollouts(script), solve(parallel_tool_calls=True))
    assert [message["content"] for message in calls[1].messages if message["role"] == "tool"] == ["5", "30"]
    assert calls[1].parent == 0


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        answer = await agent_for(model).reply(Msg("user", task["question"], "user"))
        return WorkflowOutput(reward=float(task["answer"] in answer.get_text_content()))

    check_parallel_rollouts(rollouts, workflow, tasks=12)


def test_a_copied_model_is_the_same_model(rollouts: Any) -> None:
    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        twins = [copy.copy(model), copy.deepcopy(model), copy.deepcopy(copy.deepcopy({"model": model}))["model"]]
        twins[1].generate_kwargs["temperature"] = 0.5
        assert model.generate_kwargs == {}
        for twin in twins:
            assert isinstance(twin, OpenAIChatModel)
            assert twin.client is model.client
            await agent_for(twin).reply(Msg("user", "2+3", "user"))
        return WorkflowOutput(reward=1.0)

    calls = calls_of(rollouts("5"), workflow)
    assert [each.sampling.temperature for each in calls] == [1.0, 0.5, 1.0]


def test_generate_kwargs_of_the_user_reach_the_model(rollouts: Any) -> None:
    async def workflow(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
        assert (model.generate_kwargs, model.stream) == ({}, False)
        model.generate_kwargs = {"temperature": 0.25, "max_tokens": 7}
        await agent_for(model).reply(Msg("user", "2+3", "user"))
        return WorkflowOutput(reward=1.0)

    (only,) = calls_of(rollouts("5"), workflow)
    assert (only.sampling.temperature, only.sampling.max_tokens) == (0.25, 7)


def test_a_tool_that_does_not_exist_is_told_to_the_model(rollouts: Any) -> None:
    calls = calls_of(rollouts(turns(call("multiply", '{"a": 2}'), "I cannot.")), solve())
    assert len(calls) == 2
    assert "multiply" in str(calls[1].messages[-1])


def test_tool_results_are_rendered_as_the_template_does(rollouts: Any, tokenizer: Any) -> None:
    calls = calls_of(rollouts(add_then_answer), solve())
    assert tool_results(tokenizer.decode(calls[1].prompt_ids_P)) == ["5"]
