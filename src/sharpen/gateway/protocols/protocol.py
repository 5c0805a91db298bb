"""What a protocol is to the gateway, ours or somebody's own: which requests it has, and how its errors look.

In: the functions of a vendor's API. Out: `ClientProtocol`. How a request is read says a `Parse`, how its answer is
written a `Writer`; all between them (ids, recording, parsers) exists once and knows no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.gateway.answers import Writer
from sharpen.gateway.context import Context
from sharpen.gateway.requests import ApiError, CallRequest

Route = tuple[str, str]
"""A method, and a path as it is after a leading `/v1`: `("POST", "/chat/completions")`. The path of somebody's own
protocol may have places for one name each, as `/models/{model}/generate`."""
Parse = Callable[[Any, Context], tuple[CallRequest, Writer]]
"""Reads the decoded JSON body of a request, and returns it in the words of chat completions, with what writes its
answer. Raises `ApiError` for a body that is wrong, and never anything else. A parser that puts its body into the words
of chat completions gives them to `chat.parse_request`, which reads sampling, tools, images and the form of the answer.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProtocol:
    """A vendor's API, as its clients speak it.

    `calls`: the routes whose requests are calls of the model. `pages`: those that sample nothing, whose body is made of
    the model's name. `error` returns the body of an error, which goes with the error's own status.
    """

    name: str
    calls: Mapping[Route, Parse]
    error: Callable[[ApiError], Any] = ApiError.body
    pages: Mapping[Route, Callable[[str], Any]] = field(default_factory=dict)
