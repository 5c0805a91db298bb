"""Counts the tokens of an endpoint's response while its bytes are passed on.

In: the bytes of a response, whole or streamed (server-sent events). Out: tokens added to a `Tally`. The endpoint's own
`usage` counts. In a stream without usage each chunk with content counts as one sampled token, a lower bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sharpen.gateway.meter import Tally

DATA = b"data:"
END_OF_STREAM = b"[DONE]"


class UsageReader:
    """Reads one successful response: `feed` it the decoded bytes, then `end`. `unknown` is called with a description of
    the missing counts if there was no usage."""

    def __init__(self, content_type: str, tally: Tally, unknown: Callable[[str], None]) -> None:
        self._streamed = content_type.startswith("text/event-stream")
        self._tally = tally
        self._unknown = unknown
        self._rest = bytearray()
        self._counted = 0
        self._known = False
        self._end_mark = False
        self._ended = False

    def feed(self, content: bytes) -> None:
        """Read the next bytes. Streams are counted as they arrive."""
        self._rest += content
        if not self._streamed:
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            self._read_line(line)

    def end(self, *, complete: bool) -> None:
        """Finish the count: the response is `complete`, or its reader stopped early. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if self._streamed:
            self._read_line(bytes(self._rest))
        else:
            self._read_usage(_decoded(bytes(self._rest)))
        if (complete or self._end_mark) and not self._known:
            self._unknown("the prompt's tokens" if self._streamed else "its tokens")

    def _read_line(self, line: bytes) -> None:
        if not line.startswith(DATA):
            return
        data = line.removeprefix(DATA).strip()
        if data == END_OF_STREAM:
            self._end_mark = True
            return
        chunk = _decoded(data)
        if not self._read_usage(chunk) and not self._known and _has_content(chunk):
            self._counted += 1
            self._tally.add(tokens=1)

    def _read_usage(self, body: dict[str, Any]) -> bool:
        """Count the body's usage; return False if it has none. The last usage of a stream counts."""
        nested = body.get("response")  # events of the Responses API hold it one level down
        tokens = _tokens(body.get("usage") or (nested.get("usage") if isinstance(nested, dict) else None))
        if tokens is None:
            return False
        self._known = True
        self._tally.add(tokens=tokens - self._counted)
        self._counted = tokens
        return True


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:  # a cut-off body, or no JSON at all: no usage in it
        return {}
    return body if isinstance(body, dict) else {}


def _tokens(usage: Any) -> int | None:
    """Return prompt plus sampled tokens; None if the usage has neither."""
    if not isinstance(usage, dict):
        return None
    if isinstance(total := usage.get("total_tokens"), int):
        return total
    parts = ("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens")
    known = [usage[name] for name in parts if isinstance(usage.get(name), int)]
    return sum(known) if known else None


def _has_content(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices")
    deltas = (
        [choice.get("delta") for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    )
    return any(isinstance(delta, dict) and any(delta.get(k) for k in _CONTENT) for delta in deltas)


_CONTENT = ("content", "reasoning_content", "tool_calls", "refusal")
