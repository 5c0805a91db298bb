"""An agent of LlamaIndex with its own package for OpenAI: Responses and chat, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from framework_checks import check_parallel_rollouts, check_tool_round
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAIResponses

from sharpen import WorkflowOutput


async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def workflow_of(*, stream: bool, **options: Any) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        reached = {"api_base": model.base_url, "api_key": model.api_key, "max_retries": 0}
        llm = OpenAIResponses(model=model.name, context_window=4096, **reached, **options)
        agent = FunctionAgent(tools=[add], llm=llm, system_prompt="You are helpful.", streaming=stream)
        said = str(await agent.run(task["question"]))
        return WorkflowOutput(reward=float(task["answer"] in said), response=said)

    return workflow


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("stored", [False, True], ids=["sent again", "stored"])
def test_a_tool_round_of_responses_is_two_calls_of_one_sequence(rollouts: Any, stored: bool, stream: bool) -> None:
    check_tool_round(rollouts, workflow_of(stream=stream, track_previous_responses=stored))


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, workflow_of(stream=True), tasks=4, group_size=2)
