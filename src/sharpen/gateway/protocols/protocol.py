"""What a protocol is to the gateway, ours or somebody's own: which requests it has, and how its errors look.

In: the functions of a vendor's API. Out: `ClientProtocol`. How a request is read says a `Parse`, how its answer is
written a `Writer`; all between them (ids, recording, parsers) exists once and knows no protocol. What a `Parse` knows
of the model that was asked and the rollout that asks is its `Context`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.config.public import MIN_TEMPERATURE
from sharpen.gateway.answers import Writer
from sharpen.gateway.images import ImageReader
from sharpen.gateway.memory import Memory
from sharpen.gateway.requests import ApiError, CallRequest
from sharpen.types import Sampling

MIN_TOP_P = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the validation of a request depends on beside its body.

    `defaults`: the sampling of calls that do not set their own; `greedy`: all calls are, whatever they ask for.
    `memory`: what the rollout's earlier answers said. `images`: reads those of this request. `beta`: the client asks
    for features that are not settled, so that fields may be unknown.
    """

    model_name: str
    defaults: Sampling
    greedy: bool = False
    memory: Memory = field(default_factory=Memory)
    images: ImageReader = field(default_factory=ImageReader)
    beta: bool = False


def sampling_of(
    given: Mapping[str, Any], context: Context, *, limit: str = "max_tokens", stop: str = "stop"
) -> Sampling:
    """Return the sampling of a request's fields; `limit` and `stop` are the protocol's names. Raises `ApiError`."""
    defaults = context.defaults
    temperature, top_p = given.get("temperature", defaults.temperature), given.get("top_p", defaults.top_p)
    if "temperature" in given and 0.0 < temperature < MIN_TEMPERATURE:
        raise ApiError(
            f"'temperature' is {temperature:g}; it must be 0 (greedy) or at least {MIN_TEMPERATURE:g}.",
            param="temperature",
        )
    if top_p < MIN_TOP_P:
        raise ApiError(
            f"'top_p' is {top_p:g}; it must be at least {MIN_TOP_P:g} (use 'temperature': 0 for greedy).", param="top_p"
        )
    stops = given.get(stop, ())
    return Sampling(
        temperature=0.0 if context.greedy else float(temperature),
        top_p=float(top_p),
        top_k=max(given.get("top_k", defaults.top_k), 0),
        min_p=float(given.get("min_p", defaults.min_p)),
        max_tokens=given.get(limit, defaults.max_tokens),
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
    )


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
