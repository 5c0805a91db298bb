"""An agent of the OpenAI Agents SDK on our model, over HTTP and with our client."""

from __future__ import annotations

from typing import Any

import pytest
from agent_scripts import ADD, add_numbers_of_the_question
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIProvider,
    RunConfig,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from framework_checks import TASK, check_parallel_rollouts, check_tool_round, check_what_the_process_shares
from openai import AsyncOpenAI

from sharpen import WorkflowOutput
from sharpen.types import CallStatus, Outcome


@pytest.fixture(autouse=True)
def no_tracing() -> None:
    """It would send traces to a server."""
    set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def answer(task: dict[str, Any], name: str, client: AsyncOpenAI, **settings: Any) -> WorkflowOutput:
    agent = Agent(
        name="friday",
        instructions="You are a helpful math problem solving agent.",
        tools=[add],
        model=OpenAIChatCompletionsModel(model=name, openai_client=client),
        model_settings=ModelSettings(**settings),
    )
    result = await Runner.run(agent, task["question"])
    return WorkflowOutput(reward=float(task["answer"] in result.final_output), response=result.final_output)


async def over_http(task: dict[str, Any], model: Any) -> WorkflowOutput:
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        return await answer(task, model.name, client)


async def in_process(task: dict[str, Any], model: Any) -> WorkflowOutput:
    return await answer(task, model.name, model.client, temperature=0.5, max_tokens=90)


@pytest.mark.parametrize("workflow", [over_http, in_process])
def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any, workflow: Any) -> None:
    rollout = check_tool_round(rollouts, workflow)
    if workflow is in_process:
        assert {(each.sampling.temperature, each.sampling.max_tokens) for each in rollout.calls} == {(0.5, 90)}


def by_default(*, stream: bool) -> Any:
    """As the SDK speaks unless it is told otherwise: OpenAI's responses."""

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        agent = Agent(name="friday", instructions="You solve problems.", tools=[add], model=model.name)
        async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
            settings = RunConfig(model_provider=OpenAIProvider(openai_client=client))
            if stream:
                result: Any = Runner.run_streamed(agent, task["question"], run_config=settings)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, task["question"], run_config=settings)
        return WorkflowOutput(reward=float(task["answer"] in result.final_output), response=result.final_output)

    return workflow


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_a_tool_round_of_responses_is_two_calls_of_one_sequence(rollouts: Any, stream: bool) -> None:
    check_tool_round(rollouts, by_default(stream=stream))


@pytest.mark.parametrize("workflow", [over_http, by_default(stream=False)], ids=["chat", "responses"])
def test_parallel_rollouts_are_not_mixed_up(rollouts: Any, workflow: Any) -> None:
    check_parallel_rollouts(rollouts, workflow)


def with_a_global_client(others: Any) -> Any:
    """As its documentation sets a client up once for a program."""

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        set_default_openai_client(model.client, use_for_tracing=False)
        set_default_openai_api("chat_completions")
        await others()  # set theirs
        agent = Agent(name="friday", instructions="You solve problems.", tools=[add], model=model.name)
        result = await Runner.run(agent, task["question"])
        return WorkflowOutput(reward=float(task["answer"] in result.final_output), response=result.final_output)

    return workflow


def test_a_client_of_the_whole_process_trains_nothing_of_another_rollout(rollouts: Any) -> None:
    """Red while 156 of 196 trained calls belonged to another task, with its reward, and every step was certified."""
    said = add_numbers_of_the_question
    groups = check_what_the_process_shares(rollouts, with_a_global_client, tasks=6, said=said)
    found = [rollout for group in groups for rollout in group.rollouts]
    foreign = [call for rollout in found for call in rollout.calls if call.status == CallStatus.FOREIGN]
    assert foreign, [(rollout.outcome, rollout.error) for rollout in found]
    assert not any(call.trainable for call in foreign)
    errors = [rollout.error or "" for rollout in found if not rollout.scored]
    assert any("set_default_openai_client" in error or "per rollout" in error for error in errors)


async def turns_without_end(task: dict[str, Any], model: Any) -> WorkflowOutput:
    agent = Agent(
        name="friday",
        instructions="You solve problems.",
        tools=[add],
        model=OpenAIChatCompletionsModel(model=model.name, openai_client=model.client),
    )
    result = await Runner.run(agent, task["question"], max_turns=2)
    return WorkflowOutput(reward=1.0, response=result.final_output)


def test_too_many_turns_are_the_models_failure(rollouts: Any) -> None:
    """Red while `MaxTurnsExceeded` was a `workflow_error`, drawn again until an answer survived."""
    (group,) = rollouts(ADD).run(turns_without_end, tasks=[TASK], max_attempts=3, failure_reward=0.0)
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.CALL_LIMIT, 0.0), rollout.error
    assert group.attempts == ()
    assert len(rollout.calls) == 2
