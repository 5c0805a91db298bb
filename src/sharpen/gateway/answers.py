"""One internal answer, which every protocol writes in its own words.

In: what was sampled for the choices of a request. Out: `Head`, `Delta` and `Choice`, and the `Writer` interface that
each protocol implements for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sharpen.contracts import Generation
from sharpen.gateway.formats.format import ParsedText, ToolFormat
from sharpen.gateway.render import Renderer
from sharpen.gateway.replies import EVENTS_TYPE
from sharpen.gateway.requests import ApiError
from sharpen.types import IntArray

SHORT_ID = 9
"""Letters and digits of an id in the only form that Mistral's chat templates accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is known of an answer before it is sampled: its unique name, and the prompt's ids."""

    name: str
    model: str
    created: int
    prompt_ids_P: IntArray
    num_choices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Text that was added to one choice of a streamed answer."""

    kind: Literal["reasoning", "content"]
    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of an answer: the index of its call, its message, and what was sampled.

    `finish_reason` is OpenAI's. `stop` is the stop string that ended it, if one did.
    """

    call_index: int
    message: Mapping[str, Any]
    finish_reason: str
    generation: Generation
    stop: str | None = None


class Writer(Protocol):
    """Writes the answer to one request in its protocol's words, whole or as a stream.

    `stream_type` is the content type of its streams. `streams_overflow`: the vendor answers a prompt that is too long
    with a stream, if one was asked for, in which the error is an event, and clients read it there alone.
    """

    stream_type: str = EVENTS_TYPE
    streams_overflow: bool = False

    def whole(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> dict[str, Any]:
        """Return the body of the whole answer."""

    def begin(self, head: Head) -> bytes:
        """Return the events that begin a stream."""

    def delta(self, head: Head, delta: Delta) -> bytes:
        """Return the events for text that was added."""

    def end(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> bytes:
        """Return the events after the last text: tool calls, usage, and the end."""

    def error(self, error: ApiError) -> bytes:
        """Return the events that end a stream which has begun and cannot be completed."""


def assistant_message(parsed: ParsedText, name: str, form: ToolFormat | None) -> dict[str, Any]:
    """Return the assistant message of a choice. Its tool calls have the ids that the model sampled, if each has one of
    its own; others are made from the call's `name`, as the format needs them."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None}
    if not parsed.tool_calls and not parsed.reasoning:
        message["content"] = parsed.content
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        sampled = [call.id for call in parsed.tool_calls if call.id is not None]
        own = len(set(sampled)) == len(parsed.tool_calls)
        message["tool_calls"] = [
            {
                "id": call.id if own else _call_id(name, position, form),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for position, call in enumerate(parsed.tool_calls)
        ]
    return message


def _call_id(name: str, position: int, form: ToolFormat | None) -> str:
    whole = f"{name}{position:02x}"
    if form is not None and form.short_ids:
        return hashlib.blake2b(whole.encode(), digest_size=5).hexdigest()[:SHORT_ID]
    return f"call_{whole}"
