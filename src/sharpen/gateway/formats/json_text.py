"""JSON inside sampled text: values together with the substring that they were read from.

In: sampled text. Out: values and substrings; `ValueError` for text that is not exactly JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sharpen.gateway.body import is_text, refuse_constant
from sharpen.gateway.formats.format import ToolCall

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
