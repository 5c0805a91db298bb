"""Which answers to a request for several (`n` > 1) the agent used.

In: the calls of a rollout, and what its workflow returned. Out: the same calls, where the answers that the agent did
not go on with are UNUSED. The agent went on with an answer if a later call's messages hold it, or if it is what the
workflow returned. Nothing is guessed: where neither tells, none of them counts as used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharpen.types import Call, CallStatus

Said = tuple[str, tuple[tuple[str, str], ...]]
"""What an assistant message says: its text, and the name and arguments of each tool that it calls."""


def only_used(calls: Sequence[Call], answer: str | None) -> tuple[Call, ...]:
    """The calls, with the unused choices of each request marked. `answer` is the text that the workflow returned."""
    unused = {call.index for choices in requests(calls) for call in choices} - set(_used(calls, answer))
    return tuple(
        dataclasses.replace(call, status=CallStatus.UNUSED) if call.index in unused else call for call in calls
    )


def requests(calls: Sequence[Call]) -> list[list[Call]]:
    """The delivered choices of each request for several."""
    found: dict[int, list[Call]] = {}
    for call in calls:
        if call.request is not None and call.status == CallStatus.USED:
            found.setdefault(call.request, []).append(call)
    return list(found.values())


def returned_text(response: Any) -> str | None:
    """The text of what a workflow returned: itself, or the content of a message."""
    text_of = getattr(response, "get_text_content", None)  # AgentScope's messages
    if callable(text_of):
        content = text_of()
    else:
        content = response.get("content") if isinstance(response, Mapping) else getattr(response, "content", response)
    return content if isinstance(content, str) else None


def _used(calls: Sequence[Call], answer: str | None) -> Iterator[int]:
    """The indexes of the choices that were used; of those that say the same the one whose ids a later call continues,
    else the first."""
    parents = {call.parent for call in calls}
    for choices in requests(calls):
        later = [call for call in calls if call.index > choices[-1].index]
        held = {_said(m) for call in later for m in call.messages if m.get("role") == "assistant"}
        by_what_they_say: dict[Said, list[Call]] = {}
        for call in choices:
            by_what_they_say.setdefault(_said(call.response), []).append(call)
        for said, same in by_what_they_say.items():
            continued = [call.index for call in same if call.index in parents]
            if continued:
                yield from continued
            elif said in held or (answer is not None and said == (answer.strip(), ())):
                yield same[0].index


def _said(message: Mapping[str, Any]) -> Said:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    asked = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return str(content or "").strip(), tuple((str(f.get("name")), _plain(f.get("arguments"))) for f in asked)


def _plain(arguments: Any) -> str:
    """Arguments of a tool in one form: agents write their JSON anew."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (TypeError, ValueError):
        return str(arguments)
