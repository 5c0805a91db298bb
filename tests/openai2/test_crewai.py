"""A crew of CrewAI on our model: a tool round by chat, whole and streamed, and by Responses. Its reader of streamed
Responses loses the tool calls, so that it is not tested."""

from __future__ import annotations

from typing import Any

import pytest
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from framework_checks import check_parallel_rollouts, check_tool_round

from sharpen import WorkflowOutput


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def workflow_of(*, api: str = "completions", stream: bool = False) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        reached = {"base_url": model.base_url, "api_key": model.api_key, "custom_openai": True}
        llm = LLM(model=model.name, api=api, stream=stream, max_retries=0, **reached)
        friday = Agent(role="Friday", goal="Help.", backstory="You are helpful.", tools=[add], llm=llm)
        asked = Task(description=task["question"], expected_output="The sum.", agent=friday)
        result = await Crew(agents=[friday], tasks=[asked]).akickoff()
        return WorkflowOutput(reward=float(task["answer"] in str(result)), response=str(result))

    return workflow


@pytest.mark.parametrize(("api", "stream"), [("completions", False), ("completions", True), ("responses", False)])
def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any, api: str, stream: bool) -> None:
    check_tool_round(rollouts, workflow_of(api=api, stream=stream))


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, workflow_of(), tasks=4, group_size=2)
