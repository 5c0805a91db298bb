"""What a request is asked for beside its own fields, so that the server says which tokens it computed.

In: the route and the body of a request. Out: `Asked`: the body to forward, and what was added to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.gateway.body import decode
from sharpen.gateway.requests import ApiError
from sharpen.gateway.routes import CHAT, COMPLETIONS, Route
from sharpen.types import PROMPT_ROLE, Sampling

TOKEN_IDS, LOGPROBS = "return_token_ids", "logprobs"
ADDED: Mapping[Route, Mapping[str, Any]] = {
    CHAT: {TOKEN_IDS: True, LOGPROBS: True},
    COMPLETIONS: {TOKEN_IDS: True, LOGPROBS: 0},
}
"""The routes that are recorded, and what their requests are asked for, by vLLM's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that will be recorded. `body` is forwarded; `added` are the names of what the client did not ask for,
    and `given` are its own fields."""

    route: Route
    given: Mapping[str, Any]
    body: bytes
    added: frozenset[str] = field(default_factory=frozenset)

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The request's messages; of a completion one that holds the whole prompt, as far as it is text."""
        if self.route == COMPLETIONS:
            prompt = self.given.get("prompt")
            return ({"role": PROMPT_ROLE, "content": prompt if isinstance(prompt, str) else ""},)
        return _objects(self.given.get("messages"))

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The request's tools."""
        return _objects(self.given.get("tools"))

    @property
    def sampling(self) -> Sampling:
        """What the request says of its sampling. What it leaves to the server is not known: it is noted as a
        temperature of 1, nothing truncated, and no limit (0)."""
        given, stop = self.given, self.given.get("stop")
        limit = given.get("max_completion_tokens", given.get("max_tokens"))
        return Sampling(
            temperature=float(_number(given.get("temperature"), 1.0)),
            top_p=float(_number(given.get("top_p"), 1.0)),
            top_k=max(0, int(_number(given.get("top_k"), 0))),
            max_tokens=int(_number(limit, 0)),
            stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)) if isinstance(stop, list) else (),
        )


def ask(route: Route, body: bytes, *, add: bool) -> Asked | None:
    """Return a request with what is added to it; None if it is none that can be recorded. Without `add`, as it is."""
    if route not in ADDED:
        return None
    try:
        given = decode(body)
    except ApiError:
        return None  # the server says what is wrong with it
    if not isinstance(given, dict):
        return None
    further = {name: value for name, value in ADDED[route].items() if not _has(given, name)} if add else {}
    content = dump_as_sent({**given, **further}) if further else body
    return Asked(route=route, given=given, body=content, added=frozenset(further))


def dump_as_sent(value: Any) -> bytes:
    """Return a decoded body as bytes, with the characters that it had."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _has(given: Mapping[str, Any], name: str) -> bool:
    """Whether a request sets a field; `logprobs: 0` of a completion asks for those of the sampled tokens."""
    value = given.get(name)
    return value is not None and value is not False


def _objects(value: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple(one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
