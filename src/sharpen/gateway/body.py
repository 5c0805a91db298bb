"""Decoding of a request's JSON body.

In: the bytes received. Out: a decoded body with valid Unicode strings, finite numbers, and no deeper nesting than
templates and encoders can walk; or `ApiError`, since any other body is the agent's fault.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from sharpen.gateway.requests import ApiError, short_repr

MAX_DEPTH = 64
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of a surrogate, which may lack its other half. UTF-8 itself cannot encode surrogates."""


def decode(content: bytes) -> Any:
    """Return the decoded body.

    Raises `ApiError` for invalid JSON, NaN or an infinity, a string with a lone surrogate, and more than `MAX_DEPTH`
    levels of nesting.
    """
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
