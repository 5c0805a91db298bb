"""Agents in Node on our model: the SDKs of OpenAI (chat completions, responses) and Anthropic, as a command each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coding_agents import PROGRAMS
from framework_checks import check_parallel_rollouts, check_tool_round

from sharpen import WorkflowOutput

HERE = Path(__file__).parent


def workflow_of(script: str, **options: str) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        env = {"NODE_PATH": str(PROGRAMS.parent), "QUESTION": task["question"], **options}
        ended = await model.run(["node", HERE / script], env=env, timeout_s=500)
        assert ended.exit_code == 0, ended.stderr
        return WorkflowOutput(reward=float(task["answer"] in ended.stdout), response=ended.stdout)

    return workflow


@pytest.mark.parametrize("stream", ["0", "1"], ids=["whole", "streaming"])
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("openai_chat.cjs", {}),
        ("openai_responses.cjs", {"STORE": "0"}),
        ("openai_responses.cjs", {"STORE": "1"}),
        ("anthropic_messages.cjs", {}),
    ],
    ids=["chat", "responses", "stored responses", "messages"],
)
def test_a_tool_round_is_two_calls_of_one_sequence(
    rollouts: Any, script: str, options: dict[str, str], stream: str
) -> None:
    check_tool_round(rollouts, workflow_of(script, STREAM=stream, **options))


def test_parallel_rollouts_are_not_mixed_up(rollouts: Any) -> None:
    check_parallel_rollouts(rollouts, workflow_of("openai_chat.cjs"), tasks=2, group_size=2)
