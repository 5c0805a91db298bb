"""Decoding of a request's JSON body.

In: the bytes received. Out: a decoded body with valid Unicode strings, finite numbers, no deeper nesting than templates
and encoders can walk, and no more items than can be kept; or `ApiError`, since any other body is the agent's fault.

Decoding holds the interpreter, and two bytes can cost a hundred: 60 MB of empty objects are 1.6 GB, and nobody else is
answered while they are made. So items are counted first, in the bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from sharpen.gateway.requests import ApiError, short_repr

MAX_DEPTH = 64
MAX_ITEMS = 100_000
"""Members of objects and lists, and empty objects and lists, that a body may have, at any depth; a prompt's token ids
come on top."""
CHUNK = 1 << 18
"""Bytes whose items are counted at a time: what this takes is small beside any body that is counted."""
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of a surrogate, which may lack its other half. UTF-8 itself cannot encode surrogates."""
FIELD = re.compile(rb'[{,]\s*("(?:[^"\\]|\\.){0,200}")\s*:', re.DOTALL)


def decode(content: bytes, max_items: int = MAX_ITEMS) -> Any:
    """Return the decoded body.

    Raises `ApiError` for invalid JSON, NaN or an infinity, a string with a lone surrogate, more than `MAX_DEPTH` levels
    of nesting, and more than `max_items` items, which are not decoded.
    """
    if (end := end_of_items(content, max_items)) is not None:
        field = field_at(content, end)
        within = "" if field is None else f", which {short_repr(field)} exceeds"
        raise ApiError(
            f"A request has {max_items:,} items at most (members of objects and lists, at any depth){within}.",
            status=413,
            code="too_large",
            param=field,
        )
    try:
        text = content.decode()
        body = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The request body is not JSON: {error}.") from error
    has_surrogates = SURROGATE_ESCAPE.search(text) is not None
    if isinstance(body, dict):
        for name, value in body.items():
            _check([name, value], None if has_surrogates and not is_text(name) else name, has_surrogates)
    return body


def read_json(text: str) -> Any:
    """Return the value of a JSON text within a body, of no more than `MAX_ITEMS` items. Raises `ValueError` for any
    other text, and `RecursionError`."""
    if end_of_items(text.encode(), MAX_ITEMS) is not None:
        raise ValueError("too many items")
    return json.loads(text)


def end_of_items(content: bytes, max_items: int) -> int | None:
    """Return the place of the item of a JSON text that is one too many; None if there are no more than `max_items`.

    Of a text that is not JSON, what comes before the first mistake is counted.
    """
    num_items = 0
    for at, marks in _structure(content, len(content)) if _may_have_more(content, max_items) else ():
        found = np.flatnonzero((marks == ord(",")) | (marks == ord("[")) | (marks == ord("{")))
        if num_items + len(found) > max_items:
            return at + int(found[max_items - num_items])
        num_items += len(found)
    return None


def field_at(content: bytes, place: int) -> str | None:
    """Return the field of a JSON object that a place in its text belongs to; None if it is in none."""
    begins, depth = 0, 0
    for at, marks in _structure(content, place + 1):
        opened = (marks == ord("[")) | (marks == ord("{"))
        closed = (marks == ord("]")) | (marks == ord("}"))
        depth_N = depth + np.cumsum(opened.astype(np.int8) - closed.astype(np.int8), dtype=np.int64)
        starts = np.flatnonzero((depth_N == 1) & (opened | (marks == ord(","))))
        begins = at + int(starts[-1]) if len(starts) else begins
        depth = int(depth_N[-1])
    named = FIELD.match(content, begins)
    try:
        name = None if named is None else json.loads(named[1])
    except ValueError:
        return None
    return name if name is not None and is_text(name) else None


def _may_have_more(content: bytes, max_items: int) -> bool:
    """Whether there could be more than `max_items` items, if no mark stood in a string."""
    num_marks = 0
    for at in range(0, len(content) if len(content) > max_items else 0, CHUNK):
        num_marks += sum(content.count(mark, at, at + CHUNK) for mark in b",[{")
        if num_marks > max_items:
            return True
    return False


def _structure(content: bytes, end: int) -> Iterator[tuple[int, Any]]:
    """Yield the bytes of a JSON text up to a place, piece by piece, each with its place; those of strings are zero."""
    at, within = 0, 0
    while at < end:
        piece = content[at : min(at + CHUNK, end)]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it ends within an escape
            piece = content[at : at + CHUNK + 1]
        bytes_N = np.frombuffer(piece.replace(b"\\\\", b"__").replace(b'\\"', b"__"), dtype=np.uint8)
        within_N = (np.cumsum(bytes_N == ord('"'), dtype=np.int64) + within) & 1
        yield at, np.where(within_N == 0, bytes_N, 0)
        at, within = at + len(piece), int(within_N[-1])


def refuse_constant(name: str) -> Any:
    """Raise `ValueError` for NaN and infinities, which Python's JSON decoder accepts (its `parse_constant`)."""
    raise ValueError(f"{name} is not a JSON number")


def is_text(string: str) -> bool:
    """Whether a string can be encoded as UTF-8: Python strings may contain lone surrogates."""
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_shallow(value: Any) -> bool:
    """Whether a decoded value is nested no deeper than `MAX_DEPTH`."""
    try:
        _check([value], None, has_surrogates=False)
    except ApiError:
        return False
    return True


def _check(level: list[Any], param: str | None, has_surrogates: bool) -> None:
    """Raise `ApiError` for bad values. Works level by level, since recursion itself could overflow the stack."""
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
                if has_surrogates:
                    below.extend(value)
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                if has_surrogates and not is_text(value):
                    raise ApiError(f"{short_repr(value)} is not valid text: it has a lone surrogate.", param=param)
            elif isinstance(value, float) and not math.isfinite(value):
                raise ApiError("A number is too large.", param=param)
        level = below
        if not level:
            return
    raise ApiError(f"The request is nested more than {MAX_DEPTH} levels deep.", param=param)
