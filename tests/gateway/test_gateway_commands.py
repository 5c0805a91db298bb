"""Agents that are commands: `model.run` on the model object that a workflow receives."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest

from sharpen.errors import CommandError
from sharpen.sandbox.commands import CommandResult
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


def test_the_end_of_a_rollout_ends_its_commands(serve: Any) -> None:
    """Red when `Session.close` does not stop them."""
    session = serve("hi").open()
    results: list[CommandResult] = []
    thread = threading.Thread(target=lambda: results.append(session.model.run_sync(["sleep", "60"])))
    thread.start()
    time.sleep(0.5)
    session.close()
    thread.join(20)
    assert results[0].ended_by == "the end of the rollout"
    assert results[0].folder.exists()
    with pytest.raises(CommandError, match="rollout has ended"):
        session.model.run_sync(["true"])
    session.discard()
    until = time.monotonic() + 10
    while results[0].folder.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
