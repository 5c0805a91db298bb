"""How the calls of a rollout belong together, for `sharpen show`: an agent may ask for a title, start sub-agents or
compact its history in between.

In: a rollout's calls. Out: for each call the earlier one that it continues, and what they share; and the rollout's
conversations, with what each was asked. All of it comes from the records: which ids and which messages are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sharpen.agent.transcript import content_text
from sharpen.types import Call

_ASKED = 60
"""How many characters of what a conversation was asked are shown: its end, before which agents put notes of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The calls that continue a first one, by index, in order; the end of its last user message; its tools by name."""

    calls: tuple[int, ...]
    asked: str
    tools: tuple[str, ...]


def continued(calls: Sequence[Call], call: Call) -> Call | None:
    """Return the earlier call that this one continues: its parent, else the latest one all of whose messages it
    repeats."""
    if call.parent is not None:
        return calls[call.parent]
    return next((one for one in reversed(calls[: call.index]) if _repeats(call, one)), None)


def conversations(calls: Sequence[Call]) -> list[Conversation]:
    """Group the calls by the first one that each of them goes back to."""
    first: dict[int, int] = {}
    for call in calls:
        before = continued(calls, call)
        first[call.index] = call.index if before is None else first[before.index]
    return [
        Conversation(
            calls=tuple(index for index, root in first.items() if root == call.index),
            asked=_asked(call),
            tools=_tools(call),
        )
        for call in calls
        if first[call.index] == call.index
    ]


def relation(calls: Sequence[Call], call: Call) -> str:
    """Describe what a call has to do with the earlier ones; empty for the first call and for one that goes on where the
    call before it ended."""
    before = continued(calls, call)
    if before is None:
        return f"a separate conversation: {_shared(calls[: call.index], call)}" if call.index else ""
    if call.parent is not None:
        return "" if before.index == call.index - 1 else f"continues call {before.index}"
    if len(call.messages) == len(before.messages):
        return f"asks the same as call {before.index}"
    return f"continues call {before.index} in words, not token by token: a sequence of its own"


def _repeats(call: Call, earlier: Call) -> bool:
    return tuple(call.messages[: len(earlier.messages)]) == tuple(earlier.messages)


def _shared(earlier: Sequence[Call], call: Call) -> str:
    """Describe which of the earlier calls' system prompts and tools a call has."""
    system, tools = _system(call), _tools(call)
    named = ", ".join(tools) if len(tools) <= 4 else f"{len(tools)} tools"
    now = f"tools {named}" if 0 < len(tools) <= 4 else named or "no tools"
    alike = [one for one in earlier if _system(one) == system] if system else []
    same = next((one for one in alike if _tools(one) == tools), None)
    if same is not None:
        return f"system prompt and tools of call {same.index}, another history"
    if alike:
        return f"system prompt of call {alike[0].index}, {now}"
    return f"{'another' if system else 'no'} system prompt, {now}"


def _system(call: Call) -> str:
    return "\n".join(
        content_text(one.get("content")) for one in call.messages[:1] if one.get("role") in ("system", "developer")
    )


def _tools(call: Call) -> tuple[str, ...]:
    return tuple(str(tool.get("function", {}).get("name", "?")) for tool in call.tools)


def _asked(call: Call) -> str:
    """Return the end of a call's last user message in one line, or of its last message if no user speaks."""
    spoken = [one for one in call.messages if one.get("role") == "user"] or call.messages[-1:]
    text = " ".join(content_text(spoken[-1].get("content")).split()) if spoken else ""
    return text if len(text) <= _ASKED else f"...{text[3 - _ASKED :]}"
