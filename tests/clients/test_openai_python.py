"""OpenAI's Python SDK: chat completions and responses, whole, as raw events and by the SDK's own stream helpers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agent_scripts import call
from framework_checks import TASK, check_parallel_rollouts, check_records, check_tool_round
from openai import AsyncOpenAI

from sharpen import WorkflowOutput
from sharpen.types import CallStatus, Outcome

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}


def added(arguments: str) -> str:
    numbers = json.loads(arguments)
    return str(numbers["a"] + numbers["b"])


@asynccontextmanager
async def client_of(model: Any, in_process: bool) -> Any:
    if in_process:
        yield model.client
        return
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        yield client


async def whole_chat(client: AsyncOpenAI, request: dict[str, Any]) -> Any:
    return (await client.chat.completions.create(**request)).choices[0].message


async def streamed_chat(client: AsyncOpenAI, request: dict[str, Any]) -> Any:
    async with client.chat.completions.stream(**request) as stream:
        said = "".join([event.delta async for event in stream if event.type == "content.delta"])
        message = (await stream.get_final_completion()).choices[0].message
    assert said == (message.content or "")
    return message


def chat(ask: Callable[..., Awaitable[Any]], *, in_process: bool) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        request = {"model": model.name, "messages": messages, "tools": [{"type": "function", "function": ADD}]}
        async with client_of(model, in_process) as client:
            while (message := await ask(client, request)).tool_calls:
                messages.append(message)
                for asked in message.tool_calls:
                    result = added(asked.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": asked.id, "content": result})
        return WorkflowOutput(reward=float(task["answer"] in message.content), response=message.content)

    return workflow


async def whole_response(client: AsyncOpenAI, request: dict[str, Any]) -> Any:
    return await client.responses.create(**request)


async def streamed_response(client: AsyncOpenAI, request: dict[str, Any]) -> Any:
    said, numbers = "", []
    async with client.responses.stream(**request) as stream:
        async for event in stream:
            numbers.append(event.sequence_number)
            said += event.delta if event.type == "response.output_text.delta" else ""
        response = await stream.get_final_response()
    assert said == response.output_text
    assert numbers == list(range(len(numbers)))
    return response


def responses(ask: Callable[..., Awaitable[Any]], *, in_process: bool, stored: bool) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        given: list[Any] = [{"role": "user", "content": task["question"]}]
        tools = [{"type": "function", "strict": False, **ADD}]
        request: dict[str, Any] = {"model": model.name, "tools": tools, "store": stored, "instructions": "Be brief."}
        async with client_of(model, in_process) as client:
            response = await ask(client, {**request, "input": given})
            while calls := [item for item in response.output if item.type == "function_call"]:
                results = [
                    {"type": "function_call_output", "call_id": item.call_id, "output": added(item.arguments)}
                    for item in calls
                ]
                if stored:
                    request["previous_response_id"], given = response.id, results
                else:
                    given = [*given, *response.output, *results]
                response = await ask(client, {**request, "input": given})
        return WorkflowOutput(reward=float(task["answer"] in response.output_text), response=response.output_text)

    return workflow


@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "HTTP"])
@pytest.mark.parametrize("ask", [whole_chat, streamed_chat])
def test_a_tool_round_of_chat_is_one_sequence(rollouts: Any, ask: Any, in_process: bool) -> None:
    check_tool_round(rollouts, chat(ask, in_process=in_process))


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "sent again"])
@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "HTTP"])
@pytest.mark.parametrize("ask", [whole_response, streamed_response])
def test_a_tool_round_of_responses_is_one_sequence(rollouts: Any, ask: Any, in_process: bool, stored: bool) -> None:
    check_tool_round(rollouts, responses(ask, in_process=in_process, stored=stored))


@pytest.mark.parametrize(
    "workflow", [chat(streamed_chat, in_process=False), responses(streamed_response, in_process=False, stored=True)]
)
def test_parallel_rollouts_are_not_mixed_up(rollouts: Any, workflow: Any) -> None:
    check_parallel_rollouts(rollouts, workflow, tasks=4, group_size=2)


async def two_calls_at_once(task: dict[str, Any], model: Any) -> WorkflowOutput:
    request = {"model": model.name, "tools": [{"type": "function", "function": ADD}]}
    async with client_of(model, False) as client:
        message = await streamed_chat(client, {**request, "messages": [{"role": "user", "content": task["question"]}]})
    return WorkflowOutput(reward=float(sum(int(added(one.function.arguments)) for one in message.tool_calls)))


def test_two_tool_calls_of_one_answer(rollouts: Any) -> None:
    served = rollouts(call("add", '{"a": 2, "b": 3}') + "\n" + call("add", '{"a": 10, "b": 20}'))
    (rollout,) = check_records(served.engine, served.run(two_calls_at_once, tasks=[TASK]))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 35.0), rollout.error


async def hangs_up(task: dict[str, Any], model: Any) -> WorkflowOutput:
    async with client_of(model, False) as client:
        request: Any = {
            "model": model.name,
            "messages": [{"role": "user", "content": task["question"]}],
            "stream": True,
        }
        async with await client.chat.completions.create(**request) as stream:
            async for _ in stream:
                break
        kept = await client.chat.completions.create(model=model.name, messages=request["messages"])
    return WorkflowOutput(reward=1.0, response=kept.choices[0].message.content)


def test_an_answer_whose_reader_hangs_up_is_not_trained(rollouts: Any) -> None:
    """The engine streams no more than five tokens, so that the answer is not whole before the reader is gone."""
    served = rollouts("word " * 20)
    served.engine.step_by_step = asyncio.Semaphore(5)
    (group,) = served.run(hangs_up, tasks=[TASK])
    (rollout,) = group.rollouts
    assert [each.status for each in rollout.calls] == [CallStatus.ABANDONED, CallStatus.USED], rollout.error
