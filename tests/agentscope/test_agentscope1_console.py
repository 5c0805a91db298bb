"""Agents of AgentScope 1 that exist before a run starts, such as a moderator made at import, do not print in it."""

from __future__ import annotations

import asyncio

import pytest
from agentscope.agent import AgentBase
from agentscope.message import Msg

from sharpen.agent.agentscope.console import SWITCH, silence, silent_agents


class Moderator(AgentBase):
    async def reply(self, content: str) -> Msg:
        said = Msg("moderator", content, role="assistant")
        await self.print(said)
        return said


def test_an_agent_made_before_the_run_is_silent_in_it_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red where only AgentScope's switch is set: it is read when an agent is made."""
    monkeypatch.delenv(SWITCH, raising=False)
    moderator, quiet = Moderator(), Moderator()
    silence(quiet)
    with silent_agents():
        asyncio.run(moderator("night falls"))
        asyncio.run(Moderator()("the village sleeps"))
    assert capsys.readouterr().out == ""
    asyncio.run(moderator("day breaks"))
    asyncio.run(quiet("nobody hears this"))
    assert capsys.readouterr().out == "moderator: day breaks\n"


def test_the_users_word_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(SWITCH, "false")
    moderator = Moderator()
    with silent_agents():
        asyncio.run(moderator("night falls"))
    assert "night falls" in capsys.readouterr().out
