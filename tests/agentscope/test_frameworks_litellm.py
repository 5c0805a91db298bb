"""An agent loop through LiteLLM on our model, over HTTP: it sends back every field of the message that it got."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm
import pytest
from agent_scripts import add_then_answer
from framework_checks import (
    TASK,
    check_parallel_rollouts,
    check_records,
    check_tool_round,
    check_what_the_process_shares,
)

from sharpen import WorkflowOutput
from sharpen.types import Outcome

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def workflow_of(provider: str, *, stream: bool = False) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        for _ in range(3):
            reply: Any = await litellm.acompletion(
                model=f"{provider}/{model.name}",
                messages=messages,
                tools=[TOOL],
                api_base=model.base_url.removesuffix("/v1") if provider == "anthropic" else model.base_url,
                api_key=model.api_key,
                num_retries=0,
                stream=stream,
            )
            if stream:
                reply = litellm.stream_chunk_builder([chunk async for chunk in reply], messages=messages)
            message = reply.choices[0].message
            if not message.tool_calls:
                break
            messages.append(message.model_dump())  # with `provider_specific_fields`, `function_call` and the like
            for asked in message.tool_calls:
                numbers = json.loads(asked.function.arguments)
                result = str(numbers["a"] + numbers["b"])
                messages.append({"role": "tool", "tool_call_id": asked.id, "name": "add", "content": result})
        return WorkflowOutput(reward=float(task["answer"] in (message.content or "")), response=message.content)

    return workflow


workflow = workflow_of("openai")


@pytest.mark.parametrize(
    ("provider", "stream"),
    [("openai", False), ("openai", True), ("openai/responses", False), ("anthropic", False), ("anthropic", True)],
)
def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any, provider: str, stream: bool) -> None:
    """Red while a message field that changes nothing in the prompt was a 400: every rollout that called the tool
    failed."""
    check_tool_round(rollouts, workflow_of(provider, stream=stream))


def test_its_bridge_to_streamed_responses_loses_the_tool_call(rollouts: Any) -> None:
    """The call is recorded; what LiteLLM 1.83 puts together of the events has none."""
    served = rollouts(add_then_answer)
    groups = served.run(workflow_of("openai/responses", stream=True), tasks=[TASK])
    (rollout,) = check_records(served.engine, groups)
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 0.0), rollout.error
    (call,) = rollout.calls
    assert call.response["tool_calls"]


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, workflow, tasks=4, group_size=2)


def with_the_environment(others: Any) -> Any:
    """URL and key where every client of the process looks for them."""

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = model.base_url, model.api_key
        await others()  # set theirs
        messages = [{"role": "user", "content": task["question"]}]
        reply = await litellm.acompletion(model=f"openai/{model.name}", messages=messages, num_retries=0)
        return WorkflowOutput(reward=float(task["answer"] in (reply.choices[0].message.content or "")))

    return workflow


def test_the_environment_of_the_process_trains_nothing_of_another_rollout(
    rollouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red while the rollout that came last got the calls of all, with its reward."""
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "")
    check_what_the_process_shares(rollouts, with_the_environment, tasks=4, said="The answer is 8.")
