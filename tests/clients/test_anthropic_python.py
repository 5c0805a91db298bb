"""Anthropic's Python SDK: messages whole and streamed, its tool runner, counted tokens."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from framework_checks import check_parallel_rollouts, check_tool_round

from sharpen import WorkflowOutput

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}]


@asynccontextmanager
async def client_of(model: Any, in_process: bool) -> Any:
    if in_process:
        yield model.anthropic_client
        return
    url = model.base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=url, api_key=model.api_key, max_retries=0) as client:
        yield client


async def whole(client: AsyncAnthropic, request: dict[str, Any]) -> Any:
    return await client.messages.create(**request)


async def streamed(client: AsyncAnthropic, request: dict[str, Any]) -> Any:
    async with client.messages.stream(**request) as stream:
        said = "".join([text async for text in stream.text_stream])
        message = await stream.get_final_message()
    assert said == "".join(block.text for block in message.content if block.type == "text")
    return message


def workflow_of(ask: Any, *, in_process: bool) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        request = {"model": model.name, "max_tokens": 200, "messages": messages, "tools": TOOLS, "system": "Be brief."}
        async with client_of(model, in_process) as client:
            while (message := await ask(client, request)).stop_reason == "tool_use":
                asked = [block for block in message.content if block.type == "tool_use"]
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": str(block.input["a"] + block.input["b"]),
                    }
                    for block in asked
                ]
                messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
            counted = await client.messages.count_tokens(model=model.name, messages=messages[:1], tools=TOOLS)
        assert 0 < counted.input_tokens <= len(model.calls()[0].prompt_ids_P)
        answer = message.content[0].text
        return WorkflowOutput(reward=float(task["answer"] in answer), response=answer)

    return workflow


@beta_async_tool
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def with_its_tool_runner(task: dict[str, Any], model: Any) -> WorkflowOutput:
    async with client_of(model, False) as client:
        asked: Any = [{"role": "user", "content": task["question"]}]
        runner = client.beta.messages.tool_runner(model=model.name, max_tokens=200, tools=[add], messages=asked)
        message = await runner.until_done()
    answer = message.content[0].text
    return WorkflowOutput(reward=float(task["answer"] in answer), response=answer)


@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "HTTP"])
@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_tool_round_is_one_sequence(rollouts: Any, ask: Any, in_process: bool) -> None:
    check_tool_round(rollouts, workflow_of(ask, in_process=in_process))


def test_its_tool_runner_is_one_sequence(rollouts: Any) -> None:
    check_tool_round(rollouts, with_its_tool_runner)


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, workflow_of(streamed, in_process=False), tasks=4, group_size=2)
