"""A LangGraph agent on our model, over HTTP and by three protocols: `base_url` and `api_key` are all it needs."""

from __future__ import annotations

from typing import Any

import pytest
from agent_scripts import ADD, call, turns
from framework_checks import TASK, check_parallel_rollouts, check_records, check_tool_round
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from sharpen import WorkflowOutput
from sharpen.types import Outcome


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def by_chat(model: Any, **options: Any) -> Any:
    return ChatOpenAI(model=model.name, base_url=model.base_url, api_key=model.api_key, max_retries=0, **options)


def by_responses(model: Any, **options: Any) -> Any:
    return by_chat(model, use_responses_api=True, **options)


def by_messages(model: Any, **options: Any) -> Any:
    url = model.base_url.removesuffix("/v1")
    return ChatAnthropic(model=model.name, base_url=url, api_key=model.api_key, max_retries=0, **options)


def workflow_of(chat_of: Any, *, stream: bool = False, **config: Any) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        agent = create_agent(
            chat_of(model, streaming=stream), tools=[add], system_prompt="You are a helpful math problem solving agent."
        )
        state = await agent.ainvoke({"messages": [{"role": "user", "content": task["question"]}]}, config=config)
        answer = state["messages"][-1].text
        return WorkflowOutput(reward=float(task["answer"] in answer), response=answer)

    return workflow


workflow = workflow_of(by_chat)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("chat_of", [by_chat, by_responses, by_messages])
def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any, chat_of: Any, stream: bool) -> None:
    check_tool_round(rollouts, workflow_of(chat_of, stream=stream))


def test_its_limit_of_steps_is_the_models_failure(rollouts: Any) -> None:
    """It raises `GraphRecursionError`."""
    served = rollouts(ADD)
    groups = served.run(workflow_of(by_chat, recursion_limit=4), tasks=[TASK], max_attempts=3, failure_reward=0.0)
    (rollout,) = check_records(served.engine, groups)
    assert (rollout.outcome, rollout.reward) == (Outcome.CALL_LIMIT, 0.0), rollout.error
    assert groups[0].attempts == ()


def test_arguments_that_it_writes_anew_go_on_as_sampled(rollouts: Any) -> None:
    (group,) = rollouts(turns(call("add", '{"a":2,   "b":3}'), "The answer is 5.")).run(workflow, tasks=[TASK])
    (rollout,) = group.rollouts
    assert rollout.reward == 1.0
    assert [each.parent for each in rollout.calls] == [None, 0]


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, workflow)
