"""The calls in a text, in the order in which they stand there, with the content around them; and the JSON within it.

In: a text; a function that reads the markup which begins at a place. Out: content, calls, whether it was malformed;
values together with the substring that they were read from, and `ValueError` for text that is not exactly JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from sharpen.gateway.body import is_text, refuse_constant
from sharpen.gateway.formats.format import ParsedCalls, ToolCall

WHITESPACE = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def named_call(text: str, name: str = "name", arguments: str = "arguments") -> ToolCall | None:
    """Parse `{"name": ..., "arguments": {...}}`, keeping the arguments' substring; None for anything else."""
    try:
        members = members_of(text.strip())
    except (ValueError, RecursionError):
        return None
    if set(members) != {name, arguments}:
        return None
    function, (value, written) = members[name][0], members[arguments]
    return ToolCall(name=function, arguments=written) if is_name(function) and isinstance(value, dict) else None


def is_name(value: Any) -> bool:
    """Whether a function may have this name."""
    return isinstance(value, str) and value != "" and is_text(value)


def members_of(text: str) -> dict[str, tuple[Any, str]]:
    """Return each member of a JSON object: its value and the value's substring. Raises `ValueError` for other text."""
    if not text.startswith("{"):
        raise ValueError("not an object")
    members: dict[str, tuple[Any, str]] = {}
    at = skip(text, 1)
    while True:
        key, at = DECODER.raw_decode(text, at)
        at = skip(text, at)
        if not isinstance(key, str) or key in members or text[at : at + 1] != ":":
            raise ValueError("not a member")
        start = skip(text, at + 1)
        value, end = DECODER.raw_decode(text, start)
        members[key] = (value, text[start:end])
        at = skip(text, end)
        separator, at = text[at : at + 1], at + 1
        if separator == "}" and at == len(text):
            return members
        if separator != ",":
            raise ValueError("not an object")
        at = skip(text, at)


def skip(text: str, at: int) -> int:
    """Return the place of the first character from `at` that is not JSON's whitespace."""
    match = WHITESPACE.match(text, at)
    assert match is not None  # it matches the empty string
    return match.end()


def object_at(text: str, at: int) -> tuple[str, int] | None:
    """Return the JSON object that begins at `at`, after whitespace, as a substring, and its end. None for none."""
    start = skip(text, at)
    try:
        value, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return (text[start:end], end) if isinstance(value, dict) else None


def container_end(text: str, at: int) -> int | None:
    """Return the end of the JSON object or list that begins at `at`, after whitespace; None for none."""
    start = skip(text, at)
    if not text.startswith(("{", "["), start):
        return None
    try:
        return DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def quoted(text: str) -> str:
    """Return a text as a JSON string, in its own characters."""
    return json.dumps(text, ensure_ascii=False)


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
