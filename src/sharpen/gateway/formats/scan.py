"""The calls in a text, in the order in which they stand there, with the content around them.

In: a text; a function that reads the markup which begins at a place. Out: content, calls, whether it was malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from sharpen.gateway.formats.format import ParsedCalls, ToolCall
from sharpen.gateway.formats.json_text import container_end, skip

Read = Callable[[str, int], "tuple[Sequence[ToolCall], int] | None"]
"""(text, where the opening tag begins) -> the calls, where their markup ends. None: malformed."""


def scan(text: str, opens: str, tags: Sequence[str], read: Read, *, newlines: int = 0) -> ParsedCalls:
    """Read all markup that begins with `opens`; any of `tags` outside of it is malformed.

    So many `newlines` before the first call belong to the template and are no content, like whitespace after it.
    """
    calls: list[ToolCall] = []
    rest = []
    at = 0
    while (start := text.find(opens, at)) >= 0:
        found = read(text, start)
        if found is None or not found[0]:
            return text, (), True
        calls.extend(found[0])
        rest.append(text[at:start])
        at = found[1]
    rest.append(text[at:])
    if any(tag in piece for piece in rest for tag in tags):
        return text, (), True
    if not calls:
        return text, (), False
    before, after = rest[0], "".join(rest[1:])
    for _ in range(newlines):
        before = before.removesuffix("\n")
    return before + after if after.strip() else before, tuple(calls), False


def element_value(text: str, at: int, closes: re.Pattern[str]) -> tuple[str, int] | None:
    """Return the value of an element from `at`, and the place after what `closes` it; None if nothing does.

    It ends at the first match of `closes`, but for one within JSON: an object or a list that ends right before a match
    is the value, whatever its strings spell.
    """
    json_end = container_end(text, at)
    end = None if json_end is None else closes.match(text, json_end)
    end = end or closes.search(text, at)
    return None if end is None else (text[at : end.start()], end.end())


def past(text: str, at: int, tag: str) -> int | None:
    """Return the place after `tag`, which may stand after whitespace; None if it does not stand there."""
    at = skip(text, at)
    return at + len(tag) if text.startswith(tag, at) else None
