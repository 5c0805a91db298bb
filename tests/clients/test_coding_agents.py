"""The four coding agents, unmodified, write a file: what they do is recorded as the engine sampled it. Side calls and
sub-agents are shown as what they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from agent_scripts import call, tool_results
from coding_agents import AGENTS
from framework_checks import check_records
from shown import shown

from sharpen import WorkflowOutput
from sharpen.types import CallStatus, Outcome

QUESTION = "Write 5 into answer.txt."


class TitleFirst:
    """OpenCode's model: it asks for a title and for the first answer at the same time, and whichever came last would
    decide what is recorded. The answers wait for the title."""

    def __init__(self) -> None:
        self.said = asyncio.Event()

    async def __call__(self, prompt: str) -> str:
        if "title generator" in prompt:
            self.said.set()
        await self.said.wait()
        return AGENTS["opencode"].says(prompt)


def model_of(name: str) -> Any:
    return TitleFirst() if name == "opencode" else AGENTS[name].says


def workflow_of(name: str) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        ended = await model.run(**AGENTS[name].start(QUESTION, model), timeout_s=500)
        assert ended.exit_code == 0, ended.stdout + ended.stderr
        return WorkflowOutput(reward=float(ended.read_text("answer.txt") == "5\n"), response=ended.stdout)

    return workflow


@pytest.mark.parametrize("name", AGENTS)
def test_a_coding_agent_writes_a_file(rollouts: Any, name: str) -> None:
    served = rollouts(model_of(name))
    (rollout,) = check_records(served.engine, served.run(workflow_of(name)))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert {each.status for each in rollout.calls} == {CallStatus.USED}
    main = [each for each in rollout.calls if each.tools]
    assert len(main) == 2
    assert main[1].parent == main[0].index


def test_the_title_is_shown_as_a_conversation_of_its_own(rollouts: Any, tmp_path: Path) -> None:
    served = rollouts(model_of("opencode"))
    groups = served.run(workflow_of("opencode"))
    (rollout,) = check_records(served.engine, groups)
    (title,) = (each for each in rollout.calls if not each.tools)
    lines = shown(groups, tmp_path).splitlines()
    at = lines.index("2 conversations:")
    (line,) = (one for one in lines[at + 1 : at + 3] if one.startswith(f"  call {title.index}:"))
    assert f"no tools, 1 of 1 trained ({len(title.sampled_ids_S)} tokens)" in line
    assert "another system prompt" in "".join(lines)


FINDS = {"description": "Find it", "prompt": "Which number is asked for?", "subagent_type": "general-purpose"}


def with_a_sub_agent(prompt: str) -> str:
    """Claude Code's main agent starts one that answers, and then writes the file."""
    results = tool_results(prompt)
    if not results:
        return "It is five." if FINDS["prompt"] in prompt else call("Agent", json.dumps(FINDS))
    return "Done." if len(results) > 1 else call("Bash", json.dumps({"command": "echo 5 > answer.txt"}))


def test_a_sub_agent_is_shown_as_a_conversation_of_its_own(rollouts: Any, tmp_path: Path) -> None:
    served = rollouts(with_a_sub_agent)
    groups = served.run(workflow_of("claude"))
    (rollout,) = check_records(served.engine, groups)
    assert [each.parent for each in rollout.calls] == [None, None, 0, 2]
    words = " ".join(shown(groups, tmp_path).split())
    main, sub_agent = (
        [len(each.sampled_ids_S) for each in rollout.calls if (each.index == 1) == sub] for sub in (0, 1)
    )
    assert f"calls 0, 2, 3: {len(rollout.calls[0].tools)} tools, 3 of 3 trained ({sum(main)} tokens)" in words
    assert f"call 1: {len(rollout.calls[1].tools)} tools, 1 of 1 trained ({sum(sub_agent)} tokens)" in words
    assert "(a separate conversation: another system prompt" in words
    assert "(continues call 0)" in words
