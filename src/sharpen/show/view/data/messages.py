"""Messages and calls as pages show them, and how the calls of a rollout follow from each other.

In: recorded calls. Out: `MessageView`s; for each call the `Origin` of its prompt: which earlier call it goes on from,
or why it does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sharpen.agent.transcript import clean_for_page, image_name, tool_calls
from sharpen.types import Call

MAX_TEXT = 200_000
"""Characters of one part of a message that are shown; what is cut is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a message: text, a picture (`url` is a data URL, or relative to the rollout's page), or something else,
    named by `text`."""

    kind: Literal["text", "image", "other"]
    text: str
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallView:
    """A tool call: its arguments as indented JSON where they are JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageView:
    """A message. `answers` is the name of the tool whose result it is, where that is known."""

    role: str
    name: str
    parts: tuple[Part, ...]
    reasoning: str
    tool_calls: tuple[ToolCallView, ...]
    tool_call_id: str
    answers: str


Kind = Literal["start", "continues", "fork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a call's prompt comes from: it starts a conversation, it continues the ids of call `of`, or it forks from
    `of`, whose messages it shares without sharing its ids to the end. `kept` counts the messages shared with that call
    and its answer, `kept_ids` the ids; `depth` is the number of forks and starts above it."""

    call: int
    kind: Kind
    of: int | None
    kept: int
    kept_ids: int
    reason: str
    depth: int


def message_view(message: Mapping[str, Any], tools: Mapping[str, str] | None = None) -> MessageView:
    """Return a message for a page. `tools` has the names of tools by the ids of their calls."""
    content = message.get("content")
    call_id = str(message.get("tool_call_id") or "")
    return MessageView(
        role=clean_for_page(str(message.get("role", "?"))),
        name=clean_for_page(str(message.get("name") or "")),
        parts=tuple(_parts(content)),
        reasoning=_text(message.get("reasoning_content")),
        tool_calls=_tool_calls(message),
        tool_call_id=clean_for_page(call_id),
        answers=clean_for_page((tools or {}).get(call_id, "")),
    )


def tool_names(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of the tools that messages call, by the ids of the calls."""
    names = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
                names[str(call.get("id"))] = str(call["function"].get("name"))
    return names


def origins(calls: Sequence[Call]) -> tuple[Origin, ...]:
    """Return the origin of each call."""
    found: list[Origin] = []
    for place, call in enumerate(calls):
        found.append(_origin(call, calls[:place], found))
    return tuple(found)


def _origin(call: Call, earlier: Sequence[Call], found: Sequence[Origin]) -> Origin:
    if call.parent is not None and call.parent < len(earlier):
        parent = earlier[call.parent]
        return Origin(
            call=call.index,
            kind="continues",
            of=call.parent,
            kept=_kept_and_answer(call, parent),
            kept_ids=len(parent.prompt_ids_P) + len(parent.sampled_ids_S),
            reason="",
            depth=found[call.parent].depth,
        )
    best = max(earlier, key=lambda other: (_kept(call, other), _kept_ids(call, other), other.index), default=None)
    kept = 0 if best is None else _kept(call, best)
    if best is None or not kept or _only_system(call, kept):
        return Origin(
            call=call.index,
            kind="start",
            of=None,
            kept=0,
            kept_ids=0,
            reason=_start_reason(call, earlier),
            depth=1 if earlier else 0,
        )
    return Origin(
        call=call.index,
        kind="fork",
        of=best.index,
        kept=kept,
        kept_ids=_kept_ids(call, best),
        reason=_fork_reason(call, best, kept),
        depth=found[best.index].depth + 1,
    )


def _only_system(call: Call, kept: int) -> bool:
    """Whether nothing but instructions is shared: another conversation of the same agent."""
    return all(message.get("role") in ("system", "developer") for message in call.messages[:kept])


def _start_reason(call: Call, earlier: Sequence[Call]) -> str:
    if not earlier:
        return ""
    names = {other.agent for other in earlier}
    return f"another conversation, of agent {call.agent}" if call.agent not in names else "another conversation"


def _fork_reason(call: Call, other: Call, kept: int) -> str:
    known = (*other.messages, other.response)
    if kept == len(known):
        return f"the history of call {other.index} and its answer, but the text rendered from them is another"
    if kept == len(call.messages):
        return f"the same question as call {other.index}, asked again"
    role = str(known[kept].get("role", "?"))
    if kept == len(other.messages):
        return f"the answer of call {other.index} was changed, or left out"
    if len(call.messages) < len(other.messages):
        return f"the history is shorter: message {kept} ({role}) of call {other.index} and what followed were replaced"
    return f"message {kept} ({role}) of call {other.index} was changed"


def _kept(call: Call, other: Call) -> int:
    count = 0
    for ours, theirs in zip(call.messages, (*other.messages, other.response), strict=False):
        if ours is not theirs and ours != theirs:  # what a call shares with another is read once
            break
        count += 1
    return count


def _kept_and_answer(call: Call, parent: Call) -> int:
    """Return how many messages a call has from the one that it continues, whose answer it has token by token, however
    the agent wrote it down when it sent it back."""
    kept = _kept(call, parent)
    answered = kept == len(parent.messages) < len(call.messages)
    return kept + (answered and call.messages[kept].get("role") == "assistant")


def _kept_ids(call: Call, other: Call) -> int:
    history = np.concatenate([other.prompt_ids_P, other.sampled_ids_S])
    length = min(len(history), len(call.prompt_ids_P))
    differs = history[:length] != call.prompt_ids_P[:length]
    return int(np.argmax(differs)) if differs.any() else length


def _parts(content: Any) -> list[Part]:
    if content is None or isinstance(content, str):
        return [Part(kind="text", text=_text(content))] if content else []
    if not isinstance(content, list | tuple):
        return [Part(kind="other", text=_text(json.dumps(content, ensure_ascii=False)))]
    return [_part(part) for part in content]


def _part(part: Any) -> Part:
    if not isinstance(part, Mapping):
        return Part(kind="text", text=_text(str(part)))
    kind = str(part.get("type", "text"))
    if kind in ("image_url", "input_image", "image"):
        url = part.get("image_url")
        url = str(url.get("url", "") if isinstance(url, Mapping) else url or part.get("image") or "")
        if (name := image_name(part)) is not None:
            return Part(kind="image", text=f"picture {name[:12]}", url=f"../image/{name}")
        if url.startswith("data:image/") and not url.startswith("data:image/svg"):
            return Part(kind="image", text="picture", url=url)
        return Part(kind="other", text=f"picture {_text(url[:500])}")
    if isinstance(part.get("text"), str):
        return Part(kind="text", text=_text(part["text"]))
    return Part(kind="other", text=_text(json.dumps(part, ensure_ascii=False))[:2000])


def _tool_calls(message: Mapping[str, Any]) -> tuple[ToolCallView, ...]:
    raw = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    ids = [str(call.get("id") or "") for call in raw if isinstance(call.get("function"), Mapping)]
    views = []
    for call_id, (name, arguments) in zip(ids, tool_calls(message), strict=True):
        views.append(
            ToolCallView(id=clean_for_page(call_id), name=clean_for_page(name), arguments=_indented(arguments))
        )
    return tuple(views)


def _indented(arguments: str) -> str:
    try:
        return _text(json.dumps(json.loads(arguments), indent=2, ensure_ascii=False))
    except (ValueError, RecursionError):
        return _text(arguments)


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n[{len(text) - MAX_TEXT:,} more characters are not shown]"
    return clean_for_page(text)
