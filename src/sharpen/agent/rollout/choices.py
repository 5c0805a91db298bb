"""Finds out which choices of a request with `n` > 1 the agent used.

In: the calls of a rollout, and what its workflow returned. Out: the same calls, with unused choices marked UNUSED. A
choice is used if a later call's messages contain it, or if the workflow returned it. Nothing is guessed: if neither
holds for any choice of a request, none of them counts as used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharpen.types import Call, CallStatus

Content = tuple[str, tuple[tuple[str, str], ...]]
"""The content of an assistant message: its text, and the name and arguments of each tool call."""


def mark_unused(calls: Sequence[Call], answer: str | None) -> tuple[Call, ...]:
    """Return the calls with the unused choices of each request marked. `answer` is the text the workflow returned."""
    unused = {call.index for choices in multi_choice_requests(calls) for call in choices} - set(
        _used_indexes(calls, answer)
    )
    return tuple(
        dataclasses.replace(call, status=CallStatus.UNUSED) if call.index in unused else call for call in calls
    )


def multi_choice_requests(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the delivered choices of each request that asked for several."""
    by_request: dict[int, list[Call]] = {}
    for call in calls:
        if call.request is not None and call.status == CallStatus.USED:
            by_request.setdefault(call.request, []).append(call)
    return list(by_request.values())


def returned_text(response: Any) -> str | None:
    """Return the text that a workflow returned, itself or as the content of a message; None if there is no text."""
    text_of = getattr(response, "get_text_content", None)  # AgentScope's messages
    if callable(text_of):
        content = text_of()
    else:
        content = response.get("content") if isinstance(response, Mapping) else getattr(response, "content", response)
    return content if isinstance(content, str) else None


def _used_indexes(calls: Sequence[Call], answer: str | None) -> Iterator[int]:
    """Yield the indexes of the used choices. Of choices with equal content these are the ones whose ids a later call
    continues, else the first."""
    parents = {call.parent for call in calls}
    for choices in multi_choice_requests(calls):
        later = [call for call in calls if call.index > choices[-1].index]
        kept = {content_of(m) for call in later for m in call.messages if m.get("role") == "assistant"}
        by_content: dict[Content, list[Call]] = {}
        for call in choices:
            by_content.setdefault(content_of(call.response), []).append(call)
        for content, same in by_content.items():
            continued = [call.index for call in same if call.index in parents]
            if continued:
                yield from continued
            elif content in kept or (answer is not None and content == (answer.strip(), ())):
                yield same[0].index


def content_of(message: Mapping[str, Any]) -> Content:
    """Return what a message of the assistant says, so that equal contents are equal."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return str(content or "").strip(), tuple(
        (str(f.get("name")), _normal_arguments(f.get("arguments"))) for f in functions
    )


def _normal_arguments(arguments: Any) -> str:
    """Return a tool call's arguments in a normal form, since agents may re-serialize their JSON."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (TypeError, ValueError):
        return str(arguments)
