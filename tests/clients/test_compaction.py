"""A conversation that outgrows the context is compacted by the agent itself: what was said before, the summary and what
comes after it are recorded as sampled, and are conversations of the same rollout.

Claude Code and Qwen Code compact when the vendor's own error says that the prompt is too long; Codex, which ends at
that error, when its own limit is reached.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
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
SUMMARY = "It was counted."
COUNTS = "yes the arguments | head -n {}"
"""The text is one that the toy tokenizer's tokens are made of, so that a token is four letters, as agents guess."""

LINES = 1200
SAME_BEGINNING = {"CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
WRITES = "echo 5 > answer.txt"


@dataclass(frozen=True)
class Compacting:
    """An agent: how it calls a command, how it asks for a summary and wants it, and where its conversation is too long;
    what `sharpen show` says of the summary (continuing call {0}) and of the first call after it."""

    command: Callable[[str], str]
    asks: str
    summary: str
    context: int
    summary_is: str
    next_is: str
    options: tuple[str, ...] = ()


def _bash(command: str) -> str:
    return call("Bash", json.dumps({"command": command, "description": "Count"}))


def _exec(command: str) -> str:
    return call("exec_command", json.dumps({"cmd": command}))


def _shell(command: str) -> str:
    return call("run_shell_command", f'{{"command":"{command}","is_background":false}}')


ANOTHER_HISTORY = "a separate conversation: system prompt and tools of call 0, another history"
IN_WORDS = "in words, not token by token: a sequence of its own"
COMPACTING = {
    "claude": Compacting(
        _bash,
        asks="Do NOT call any tools",
        summary=f"<summary>\n{SUMMARY}\n</summary>",
        context=17_000,
        summary_is="continues call {0}",
        next_is=ANOTHER_HISTORY,
    ),
    "qwen": Compacting(
        _shell,
        asks="generate the <state_snapshot>",
        summary=f"<state_snapshot>{SUMMARY}</state_snapshot>",
        context=20_000,
        summary_is="a separate conversation: another system prompt, no tools",
        next_is=ANOTHER_HISTORY,
    ),
    "codex": Compacting(
        _exec,
        asks="CHECKPOINT COMPACTION",
        summary=SUMMARY,
        context=20_000,
        summary_is=f"continues call {{0}} {IN_WORDS}",
        next_is=f"continues call 0 {IN_WORDS}",
        options=("-c", "model_auto_compact_token_limit=12000"),
    ),
}


def says(agent: Compacting) -> Callable[[str], str]:
    """It prints and prints until it is asked for a summary; with the summary, it writes the file and is done."""

    def say(prompt: str) -> str:
        if agent.asks in prompt.rpartition("<|im_start|>user")[2]:
            return agent.summary
        if SUMMARY in prompt:
            return "Done." if WRITES in prompt else agent.command(WRITES)
        return agent.command(COUNTS.format(LINES + len(tool_results(prompt))))

    return say


def workflow_of(name: str) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        started = AGENTS[name].start(QUESTION, model, short=True)
        started["arguments"] += COMPACTING[name].options
        ended = await model.run(**started, env=SAME_BEGINNING, timeout_s=500)
        assert ended.exit_code == 0, ended.stdout + ended.stderr
        return WorkflowOutput(reward=float(ended.read_text("answer.txt") == "5\n"), response=ended.stdout)

    return workflow


@pytest.mark.parametrize("name", COMPACTING)
def test_what_is_said_before_and_after_the_summary_is_trained(rollouts: Any, name: str, tmp_path: Path) -> None:
    """The summary continues a part of the history (Claude Code) or is a sequence of its own; after it a new one begins.
    Red with another wording of the error, which the agents do not know."""
    agent = COMPACTING[name]
    served = rollouts(says(agent), max_model_len=agent.context)
    groups = served.run(workflow_of(name))
    (rollout,) = check_records(served.engine, groups)
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert {each.status for each in rollout.calls} == {CallStatus.USED}
    (summary,) = (each for each in rollout.calls if agent.asks in str(each.messages[-1]))
    before, after = rollout.calls[: summary.index], rollout.calls[summary.index + 1 :]
    assert [each.parent for each in before] == [None, *range(len(before) - 1)]
    assert len(after) == 2
    assert after[0].parent is None
    assert SUMMARY in str(after[0].messages)
    assert all(len(each.prompt_ids_P) <= agent.context for each in rollout.calls)
    words = " ".join(shown(groups, tmp_path).split())
    continued = before[-1].index if summary.parent is None else summary.parent
    assert f"({agent.summary_is.format(continued)})" in words
    assert f"({agent.next_is})" in words
    assert words.count(", trained, advantage") == len(rollout.calls)
