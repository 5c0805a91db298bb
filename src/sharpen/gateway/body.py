"""The JSON of a request, checked as such before anything looks at it.

In: the bytes that came. Out: a decoded body all of whose strings are text and all of whose numbers are numbers, nested
no deeper than what templates and encoders can walk; or `ApiError`: what cannot be that is the agent's fault.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from sharpen.gateway.requests import ApiError, shown

MAX_DEPTH = 64
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that may be half of a surrogate pair; UTF-8 itself has none."""


def decode(content: bytes) -> Any:
    """The decoded body. Raises `ApiError` for what is no JSON, for NaN and infinities, for strings that are no text
    (a lone half of a surrogate pair), and for more than 64 levels."""
    try:
        text = content.decode()
        body = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The request body is not JSON: {error}.") from error
    halves = HALF.search(text) is not None
    if isinstance(body, dict):
        for name, value in body.items():
            _check([name, value], None if halves and not is_text(name) else name, halves)
    return body


def is_text(string: str) -> bool:
    """Whether it can be written: Python's strings may hold lone halves of surrogate pairs, which are no characters."""
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_shallow(value: Any) -> bool:
    """Whether a decoded value is nested no deeper than `MAX_DEPTH`."""
    try:
        _check([value], None, halves=False)
    except ApiError:
        return False
    return True


def _check(level: list[Any], param: str | None, halves: bool) -> None:
    """Look at values level by level, so that no nesting is too deep for the look itself."""
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
                if halves:
                    below.extend(value)
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                if halves and not is_text(value):
                    raise ApiError(f"{shown(value)} is no text: half of a surrogate pair stands alone.", param=param)
            elif isinstance(value, float) and not math.isfinite(value):
                raise ApiError("A number is too large.", param=param)
        level = below
        if not level:
            return
    raise ApiError(f"It is nested more than {MAX_DEPTH} levels deep.", param=param)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
