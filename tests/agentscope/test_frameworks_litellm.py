"""An agent loop through LiteLLM on our model, over HTTP: it sends back every field of the message that it got."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import litellm
import pytest
from framework_checks import check_parallel_rollouts, check_tool_round, check_what_the_process_shares

from sharpen import WorkflowOutput

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(3):
        reply = await litellm.acompletion(
            model=f"openai/{model.name}",
            messages=messages,
            tools=[TOOL],
            api_base=model.base_url,
            api_key=model.api_key,
            num_retries=0,
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump())  # with `provider_specific_fields`, `function_call` and the like
        for asked in message.tool_calls:
            numbers = json.loads(asked.function.arguments)
            result = str(numbers["a"] + numbers["b"])
            messages.append({"role": "tool", "tool_call_id": asked.id, "name": "add", "content": result})
    return WorkflowOutput(reward=float(task["answer"] in (message.content or "")), response=message.content)


def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any) -> None:
    """Red while a message field that changes nothing in the prompt was a 400: every rollout that called the tool
    failed."""
    check_tool_round(rollouts, workflow)


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, workflow, tasks=4, group_size=2)


async def with_the_environment(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """URL and key where every client of the process looks for them."""
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = model.base_url, model.api_key
    await asyncio.sleep(0.01)  # the other rollouts set theirs
    messages = [{"role": "user", "content": task["question"]}]
    reply = await litellm.acompletion(model=f"openai/{model.name}", messages=messages, num_retries=0)
    return WorkflowOutput(reward=float(task["answer"] in (reply.choices[0].message.content or "")))


def test_the_environment_of_the_process_trains_nothing_of_another_rollout(
    rollouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red while the rollout that came last got the calls of all, with its reward."""
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "")
    check_what_the_process_shares(rollouts, with_the_environment, tasks=4, said="The answer is 8.")
