"""An agent of Pydantic AI on our model: it raises on output that it cannot use, after asking the model again itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agent_scripts import ADD
from anthropic import AsyncAnthropic
from framework_checks import TASK as SUM
from framework_checks import check_parallel_rollouts, check_records, check_tool_round
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelRetry, TextOutput, UsageLimits
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from sharpen import WorkflowOutput
from sharpen.types import Outcome

TASK = {"question": "2+3", "answer": 5}


def number_in(text: str) -> int:
    """Asks the model again where its text is no number."""
    if not text.strip().isdecimal():
        raise ModelRetry("Answer with a number alone.")
    return int(text)


async def in_process(task: dict[str, Any], model: Any) -> WorkflowOutput:
    return await answer(task, model.name, model.client)


async def over_http(task: dict[str, Any], model: Any) -> WorkflowOutput:
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        return await answer(task, model.name, client)


async def answer(task: dict[str, Any], name: str, client: AsyncOpenAI) -> WorkflowOutput:
    model = OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, output_type=TextOutput(number_in), retries=1)
    result = await agent.run(task["question"])
    return WorkflowOutput(reward=float(result.output == task["answer"]), response=result.output)


@pytest.mark.parametrize("workflow", [in_process, over_http])
def test_an_answer_that_it_can_use(rollouts: Any, workflow: Any) -> None:
    (group,) = rollouts("5").run(workflow, tasks=[TASK])
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert len(rollout.calls) == 1


@pytest.mark.parametrize("failure_reward", [None, 0.0])
def test_output_that_it_raises_on_is_the_models_failure(rollouts: Any, failure_reward: float | None) -> None:
    """Red while it was a `workflow_error`, drawn again until an answer survived: here every answer is bad, so that all
    three attempts were made."""
    served = rollouts("no number")
    (group,) = served.run(in_process, tasks=[TASK], max_attempts=3, failure_reward=failure_reward)
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.UNUSABLE_ANSWER, failure_reward), rollout.error
    assert "UnexpectedModelBehavior" in (rollout.error or "")
    assert group.attempts == ()
    assert len(rollout.calls) == 2  # its own second try is part of the rollout
    assert all(call.trainable for call in rollout.calls)


@asynccontextmanager
async def openai_client(model: Any) -> AsyncIterator[OpenAIProvider]:
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        yield OpenAIProvider(openai_client=client)


@asynccontextmanager
async def by_chat(model: Any) -> AsyncIterator[Any]:
    async with openai_client(model) as provider:
        yield OpenAIChatModel(model.name, provider=provider)


@asynccontextmanager
async def by_responses(model: Any) -> AsyncIterator[Any]:
    async with openai_client(model) as provider:
        yield OpenAIResponsesModel(model.name, provider=provider)


@asynccontextmanager
async def by_messages(model: Any) -> AsyncIterator[Any]:
    url = model.base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=url, api_key=model.api_key, max_retries=0) as client:
        yield AnthropicModel(model.name, provider=AnthropicProvider(anthropic_client=client))


async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def with_a_tool(model_of: Any, *, stream: bool = False, **options: Any) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        async with model_of(model) as chat:
            agent = Agent(chat, tools=[add], instructions="You are helpful.")
            if stream:
                async with agent.run_stream(task["question"]) as result:
                    said = await result.get_output()
            else:
                said = (await agent.run(task["question"], **options)).output
        return WorkflowOutput(reward=float(task["answer"] in said), response=said)

    return workflow


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("model_of", [by_chat, by_responses, by_messages])
def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any, model_of: Any, stream: bool) -> None:
    check_tool_round(rollouts, with_a_tool(model_of, stream=stream))


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, with_a_tool(by_messages), tasks=4, group_size=2)


def test_its_limit_of_requests_is_the_models_failure(rollouts: Any) -> None:
    """It raises `UsageLimitExceeded`."""
    served = rollouts(ADD)
    workflow = with_a_tool(by_chat, usage_limits=UsageLimits(request_limit=2))
    groups = served.run(workflow, tasks=[SUM], max_attempts=3, failure_reward=0.0)
    (rollout,) = check_records(served.engine, groups)
    assert (rollout.outcome, rollout.reward) == (Outcome.CALL_LIMIT, 0.0), rollout.error
    assert len(rollout.calls) == 2
