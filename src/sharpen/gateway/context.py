"""What a request is read in: the model that was asked, and the rollout that asks.

In: a session, fields of a body. Out: `Context`, for the parsers of the protocols, and the sampling that they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.config.public import MIN_TEMPERATURE
from sharpen.gateway.images import ImageReader
from sharpen.gateway.memory import Memory
from sharpen.gateway.requests import ApiError, integer, number
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
    given: Mapping[str, Any],
    context: Context,
    *,
    limit: str = "max_tokens",
    stop: str = "stop",
    max_temperature: float = 100.0,
) -> Sampling:
    """Return the sampling of a request's fields; `limit` and `stop` are the protocol's names. Raises `ApiError`."""
    defaults = context.defaults
    max_tokens = integer(given, limit, defaults.max_tokens, 1, 2**31 - 1)
    temperature = number(given, "temperature", defaults.temperature, 0.0, max_temperature)
    if "temperature" in given and 0.0 < temperature < MIN_TEMPERATURE:
        raise ApiError(
            f"'temperature' is {temperature:g}; it must be 0 (greedy) or at least {MIN_TEMPERATURE:g}.",
            param="temperature",
        )
    top_p = number(given, "top_p", defaults.top_p, 0.0, 1.0)
    if top_p < MIN_TOP_P:
        raise ApiError(
            f"'top_p' is {top_p:g}; it must be at least {MIN_TOP_P:g} (use 'temperature': 0 for greedy).", param="top_p"
        )
    top_k = integer(given, "top_k", defaults.top_k, -1, 2**31 - 1)
    return Sampling(
        temperature=0.0 if context.greedy else temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        max_tokens=max_tokens,
        stop=_stop_strings(given, stop),
    )


def _stop_strings(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    stop = given.get(name, [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ApiError(f"'{name}' must be a non-empty string or a list of them.", param=name)
    return tuple(stop)
