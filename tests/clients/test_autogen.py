"""An agent of AutoGen on our model, over HTTP and with our client; its protobuf is older than 6."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from agent_scripts import add_then_answer
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from framework_checks import TASK, check_parallel_rollouts, check_records, check_tool_round
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sharpen import WorkflowOutput
from sharpen.show.monitor.tensorboard import TensorBoardSink
from sharpen.types import Outcome

ABILITIES = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def workflow_of(*, stream: bool = False, **options_of_agent: Any) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        options: dict[str, Any] = {"base_url": model.base_url, "api_key": model.api_key, "max_retries": 0}
        chat = OpenAIChatCompletionClient(model=model.name, model_info=ABILITIES, **options)
        loop = options_of_agent or {"max_tool_iterations": 3}
        agent = AssistantAgent(
            "friday", chat, tools=[add], model_client_stream=stream, system_message="You are helpful.", **loop
        )
        result = await agent.run(task=task["question"])
        await chat.close()
        answer = result.messages[-1].to_text()
        return WorkflowOutput(reward=float(task["answer"] in answer), response=answer)

    return workflow


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_a_tool_round_is_two_calls_of_one_sequence(rollouts: Any, stream: bool) -> None:
    check_tool_round(rollouts, workflow_of(stream=stream))


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, workflow_of(), tasks=4, group_size=2)


def test_its_reflection_is_a_sequence_of_its_own(rollouts: Any) -> None:
    """`reflect_on_tool_use` asks for the answer without the tools, which is another prompt."""
    served = rollouts(add_then_answer)
    groups = served.run(workflow_of(reflect_on_tool_use=True), tasks=[TASK])
    (rollout,) = check_records(served.engine, groups)
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert [(each.parent, len(each.tools)) for each in rollout.calls] == [(None, 1), (None, 0)]


def test_tensorboard_reads_what_is_written_beside_its_protobuf(tmp_path: Path) -> None:
    assert int(version("protobuf").split(".")[0]) < 6
    sink = TensorBoardSink(tmp_path)
    sink.log(3, {"reward/mean": 0.5})
    sink.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    (event,) = read.Scalars("reward/mean")
    assert (event.step, event.value) == (3, 0.5)
