"""Agents that are commands: `model.run` on the model object that a workflow receives."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import eventually
from scripted_rollouts import Rollouts, rollouts_of

from sharpen import WorkflowOutput
from sharpen.agent.sandbox.commands import CommandResult
from sharpen.errors import CommandError
from sharpen.types import CallStatus

ASK = """
import os, openai
chat = openai.OpenAI(max_retries=0).chat.completions
messages = [{"role": "user", "content": open("question").read()}]
answer = chat.create(model=os.environ["OPENAI_MODEL"], messages=messages).choices[0].message.content
open("answer", "w").write(answer)
"""
CURL = """
curl --silent --fail "$ANTHROPIC_BASE_URL/v1/chat/completions" --header "x-api-key: $ANTHROPIC_API_KEY" \
    --json '{"model": "'$ANTHROPIC_MODEL'", "messages": [{"role": "user", "content": "hello"}]}'
"""


def test_calls_of_a_command_are_those_of_its_rollout(serve: Any) -> None:
    served = serve(lambda request: f"{len(request.prompt_ids)}")
    sessions = [served.open(f"g/{i}") for i in range(4)]

    async def agent(session: Any, question: str) -> CommandResult:
        result: CommandResult = await session.model.run(
            [sys.executable, "-c", ASK], files={"question": question}, timeout_s=100
        )
        return result

    async def main() -> list[CommandResult]:
        return await asyncio.gather(*(agent(session, "a" * (i + 1)) for i, session in enumerate(sessions)))

    results = asyncio.run(main())
    for i, (session, result) in enumerate(zip(sessions, results, strict=True)):
        assert (result.exit_code, result.stderr, result.created) == (0, "", ("answer",))
        (call,) = session.close()
        assert call.messages[0]["content"] == "a" * (i + 1)
        assert call.status == CallStatus.USED
        assert result.read_text("answer") == str(len(call.prompt_ids_P)), "readable until the end, for the judge"
        session.discard()


def test_any_language_is_an_agent(serve: Any) -> None:
    session = serve("hi").open()
    result = session.model.run_sync(["sh", "-c", CURL])
    assert '"content":"hi"' in result.stdout.replace(" ", "")
    assert len(session.close()) == 1
    session.discard()


def test_the_end_of_a_rollout_ends_its_commands(serve: Any, tmp_path: Path) -> None:
    """Red when `Session.close` does not stop them."""
    session = serve("hi").open()
    results: list[CommandResult] = []
    command = ["sh", "-c", f"touch {tmp_path}/begun; sleep 600"]
    thread = threading.Thread(target=lambda: results.append(session.model.run_sync(command)))
    thread.start()
    eventually((tmp_path / "begun").exists)
    session.close()
    thread.join(120)
    assert results[0].ended_by == "the end of the rollout"
    assert results[0].folder.exists()
    with pytest.raises(CommandError, match="rollout has ended"):
        session.model.run_sync(["true"])
    session.discard()
    eventually(lambda: not results[0].folder.exists())


@pytest.fixture
def rollouts(tokenizer: Any, serving: Any) -> Iterator[Rollouts]:
    made = rollouts_of(tokenizer, serving, "hi")
    yield made
    serving.run(made.gateway.close())


def test_the_judge_reads_the_folder_which_then_goes(rollouts: Rollouts) -> None:
    folders: list[Path] = []

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response=await model.run([sys.executable, "-c", ASK], files={"question": "a"}))

    async def judge(task: Any, response: Any) -> float:
        folders.append(response.folder)
        return float(response.read_text("answer") == "hi")

    (group,) = rollouts.run(workflow, judge, group_size=2)
    assert [(rollout.outcome, rollout.reward, len(rollout.calls)) for rollout in group.rollouts] == [("ok", 1.0, 1)] * 2
    eventually(lambda: not any(folder.exists() for folder in folders))


@pytest.mark.parametrize("blocking", [False, True])
def test_the_time_limit_of_a_rollout_ends_its_commands(rollouts: Rollouts, tmp_path: Path, blocking: bool) -> None:
    """In blocking code too, whose thread nobody can cancel. What lives holds the lock. On a loaded machine the limit
    may pass before the command has begun: then a longer one is tried."""
    command = ["sh", "-c", f"exec 9> {tmp_path}/lives; flock 9; trap '' TERM; pwd > {tmp_path}/folder; sleep 600"]

    async def workflow(task: Any, model: Any) -> float:
        if blocking:
            await asyncio.to_thread(model.run_sync, command)
        else:
            await model.run(command)
        return 1.0

    for timeout_s in (1.0, 10.0, 120.0):
        (group,) = rollouts.run(workflow, timeout_s=timeout_s)
        assert [rollout.outcome for rollout in group.rollouts] == ["timeout"]
        if (tmp_path / "folder").exists():
            break
    folder = Path((tmp_path / "folder").read_text().strip())
    eventually(lambda: not folder.exists())
    with (tmp_path / "lives").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
