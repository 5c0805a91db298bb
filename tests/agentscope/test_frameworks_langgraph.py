"""A LangGraph agent on our model, over HTTP: `base_url` and `api_key` are all it needs."""

from __future__ import annotations

from typing import Any

from agent_scripts import call, turns
from framework_checks import TASK, check_parallel_rollouts, check_tool_round
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from sharpen import WorkflowOutput


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    chat = ChatOpenAI(model=model.name, base_url=model.base_url, api_key=model.api_key, max_retries=0)
    agent = create_agent(chat, tools=[add], system_prompt="You are a helpful math problem solving agent.")
    state = await agent.ainvoke({"messages": [{"role": "user", "content": task["question"]}]})
    answer = state["messages"][-1].text
    return WorkflowOutput(reward=float(task["answer"] in answer), response=answer)


def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any) -> None:
    check_tool_round(rollouts, workflow)


def test_arguments_that_it_writes_anew_go_on_as_sampled(rollouts: Any) -> None:
    (group,) = rollouts(turns(call("add", '{"a":2,   "b":3}'), "The answer is 5.")).run(workflow, tasks=[TASK])
    (rollout,) = group.rollouts
    assert rollout.reward == 1.0
    assert [each.parent for each in rollout.calls] == [None, 0]


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, workflow)
