"""Server-sent events, one by one as they arrive.

In: pieces of a body, cut anywhere. Out: whole events, byte for byte; the JSON that one holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

_END = re.compile(rb"\r?\n\r?\n|\r\r")


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield each event with the empty line that ends it; the last one may lack it."""
    left = b""
    async for piece in pieces:
        left += piece
        while (end := _END.search(left)) is not None:
            yield left[: end.end()]
            left = left[end.end() :]
    if left:
        yield left


def data_of(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object that an event holds; None for any other event."""
    lines = [line for line in event.splitlines() if line]
    data = b"\n".join(line.removeprefix(b"data:") for line in lines if line.startswith(b"data:"))
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) and len(lines) == 1 else None


def is_done(event: bytes) -> bool:
    """Whether an event says that the stream is over."""
    return event.strip() == b"data: [DONE]"
