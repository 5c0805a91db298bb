"""Agents of AgentScope 1.x print every message that they exchange: not during a run.

AgentScope's own switch silences agents that are made while it is on; agents that exist already, such as a moderator
made when its module was imported, are told one by one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

SWITCH = "AGENTSCOPE_DISABLE_CONSOLE_OUTPUT"
"""AgentScope 1.x's own switch, since 1.0.8."""
_PRINTS = "_disable_console_output"
"""Where an agent keeps it."""


@contextlib.contextmanager
def silent_agents() -> Iterator[None]:
    """Agents of AgentScope 1.x do not print within, unless the user has set the switch either way."""
    if SWITCH in os.environ:
        yield
        return
    os.environ[SWITCH] = "true"
    told = _printing_agents()
    try:
        for agent in told:
            silence(agent)
        yield
    finally:
        for agent in told:
            setattr(agent, _PRINTS, False)
        os.environ.pop(SWITCH, None)


def silence(agent: Any) -> None:
    """Make an agent print nothing, as its release of AgentScope 1.x has it."""
    if hasattr(agent, "set_console_output_enabled"):
        agent.set_console_output_enabled(False)
    else:
        agent.disable_console_output()


def _printing_agents() -> list[Any]:
    """Return the agents of this process that print."""
    base = getattr(sys.modules.get("agentscope.agent"), "AgentBase", None)
    if base is None or not hasattr(base, "disable_console_output"):  # AgentScope 2 prints nothing
        return []
    if frozen := gc.get_freeze_count():  # by the owner of this process: what is frozen is not listed
        gc.unfreeze()
    agents = [one for one in gc.get_objects() if issubclass(type(one), base)]  # of any other object nothing is asked
    if frozen:
        gc.freeze()
    return [agent for agent in agents if getattr(agent, _PRINTS, None) is False]
