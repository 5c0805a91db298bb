"""An agent of LlamaIndex on our model, over HTTP: it asks for a temperature of its own, which the check says."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from framework_checks import check_tool_round, check_what_the_process_shares
from llama_index.core import Settings
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.litellm import LiteLLM

from sharpen import TunerModelConfig, WorkflowOutput
from sharpen.agent.rollout.check import check_groups
from sharpen.types import Outcome

TASK = {"question": "2+3", "answer": "5"}


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    llm = LiteLLM(model=f"openai/{model.name}", api_base=model.base_url, api_key=model.api_key, max_retries=0)
    reply = await llm.achat([ChatMessage(role="user", content=task["question"])])
    return WorkflowOutput(reward=float(task["answer"] in (reply.message.content or "")))


def test_its_own_temperature_is_said_by_the_check(rollouts: Any) -> None:
    """It asks for 0.1 unless told otherwise: answers of a group are nearly alike, and 7 of 8 groups were flat."""
    groups = rollouts("It is 5.").run(workflow, tasks=[TASK, {**TASK, "answer": "6"}], group_size=2)
    found = [rollout for group in groups for rollout in group.rollouts]
    assert [rollout.outcome for rollout in found] == [Outcome.OK] * 4, found[0].error
    assert {call.sampling.temperature for rollout in found for call in rollout.calls} == {0.1}
    report = check_groups(groups, model=TunerModelConfig(model_path="toy", max_model_len=64))
    assert any("temperature" in line and "0.1" in line for line in report.findings), report.findings


def with_the_global_model(others: Any) -> Any:
    """As its documentation sets a model up once for a program."""

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        Settings.llm = LiteLLM(
            model=f"openai/{model.name}", api_base=model.base_url, api_key=model.api_key, max_retries=0
        )
        await others()  # set theirs
        reply = await Settings.llm.achat([ChatMessage(role="user", content=task["question"])])
        return WorkflowOutput(reward=float(task["answer"] in (reply.message.content or "")))

    return workflow


def test_a_model_of_the_whole_process_trains_nothing_of_another_rollout(rollouts: Any) -> None:
    """Red while the rollout that came last got the calls of all, with its reward."""
    check_what_the_process_shares(rollouts, with_the_global_model, tasks=4, said="It is 5.")


async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def with_a_tool(provider: str, *, stream: bool) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        url = model.base_url.removesuffix("/v1") if provider == "anthropic" else model.base_url
        litellm.register_model({f"{provider}/{model.name}": {"supports_function_calling": True}})
        llm = LiteLLM(model=f"{provider}/{model.name}", api_base=url, api_key=model.api_key, max_retries=0)
        agent = FunctionAgent(tools=[add], llm=llm, system_prompt="You are helpful.", streaming=stream)
        said = str(await agent.run(task["question"]))
        return WorkflowOutput(reward=float(task["answer"] in said), response=said)

    return workflow


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any, provider: str, stream: bool) -> None:
    check_tool_round(rollouts, with_a_tool(provider, stream=stream))
