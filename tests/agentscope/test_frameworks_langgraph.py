"""A LangGraph agent on our model, over HTTP: `base_url` and `api_key` are all it needs."""

from __future__ import annotations

from typing import Any

from agent_scripts import add_numbers_of_the_question, add_then_answer, call, turns
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from sharpen import WorkflowOutput
from sharpen.types import CallStatus, Outcome


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


TASK = {"question": "2+3", "answer": "The answer is 5."}


def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any) -> None:
    (group,) = rollouts(add_then_answer).run(workflow, tasks=[TASK])
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert [each.parent for each in rollout.calls] == [None, 0]
    assert [each.status for each in rollout.calls] == [CallStatus.USED] * 2
    assert [tool["function"]["name"] for tool in rollout.calls[0].tools] == ["add"]


def test_arguments_that_it_writes_anew_start_a_new_sequence(rollouts: Any) -> None:
    (group,) = rollouts(turns(call("add", '{"a":2,   "b":3}'), "The answer is 5.")).run(workflow, tasks=[TASK])
    (rollout,) = group.rollouts
    assert rollout.reward == 1.0
    assert [each.parent for each in rollout.calls] == [None, None]


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    tasks = [{"question": f"{i}+{7 * i}", "answer": f"The answer is {8 * i}."} for i in range(1, 7)]
    groups = rollouts(add_numbers_of_the_question).run(workflow, tasks=tasks, group_size=4)
    assert [rollout.reward for group in groups for rollout in group.rollouts] == [1.0] * 24
    for task, group in zip(tasks, groups, strict=True):
        assert all(task["question"] in str(c.messages) for rollout in group.rollouts for c in rollout.calls)
