"""What a request is asked for beside its own fields, so that the server says which tokens it computed.

In: the route and the body of a request. Out: `Asked`: the body to forward, and what was added to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.gateway.body import decode
from sharpen.gateway.images import decoded, reference
from sharpen.gateway.protocols.protocol import Route
from sharpen.gateway.requests import ApiError
from sharpen.gateway.routes import CHAT, COMPLETIONS
from sharpen.types import PROMPT_ROLE, Picture, Sampling

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

    def messages(self) -> tuple[tuple[Mapping[str, Any], ...], tuple[Picture, ...]]:
        """Return the request's messages, with references in place of images that were sent whole, and these images; of
        a completion one message that holds the whole prompt, as far as it is text."""
        if self.route == COMPLETIONS:
            prompt = self.given.get("prompt")
            return ({"role": PROMPT_ROLE, "content": prompt if isinstance(prompt, str) else ""},), ()
        pictures: list[Picture] = []
        messages = tuple(with_references(message, pictures) for message in _objects(self.given.get("messages")))
        return messages, tuple(pictures)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The request's tools."""
        return _objects(self.given.get("tools"))

    @property
    def sampling(self) -> Sampling:
        """What the request says of its sampling."""
        return sampling_of(self.given)


def sampling_of(given: Mapping[str, Any]) -> Sampling:
    """Return what a request's fields say of its sampling. What they leave to the server is not known: it is noted as a
    temperature of 1, nothing truncated, and no limit (0)."""
    limit, stop = given.get("max_completion_tokens", given.get("max_tokens")), given.get("stop")
    return Sampling(
        temperature=float(_number(given.get("temperature"), 1.0)),
        top_p=float(_number(given.get("top_p"), 1.0)),
        top_k=max(0, int(_number(given.get("top_k"), 0))),
        min_p=float(_number(given.get("min_p"), 0.0)),
        max_tokens=int(_number(limit, 0)),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)) if isinstance(stop, list) else (),
    )


MAX_RECORDED_ITEMS = 1 << 20
"""Items of a request that is recorded: how many token ids the server's model takes is not known."""


def ask(route: Route, body: bytes, *, add: bool) -> Asked | None:
    """Return a request with what is added to it; None if it is none that can be recorded. Without `add`, as it is."""
    if route not in ADDED:
        return None
    try:
        given = decode(body, MAX_RECORDED_ITEMS)
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


def with_references(message: Mapping[str, Any], pictures: list[Picture]) -> Mapping[str, Any]:
    """Return a message with references in place of its images, which are added to `pictures`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "image_url":
            source = part.get("image_url")
            picture = _picture(source.get("url") if isinstance(source, dict) else source)
            if picture is not None:
                pictures.append(picture)
                about = source if isinstance(source, dict) else {}
                part = {**part, "image_url": {**about, **reference(picture.sha256)["image_url"]}}
        parts.append(part)
    return {**message, "content": parts}


def _picture(url: Any) -> Picture | None:
    """Return the picture of a data URL; None for what is none, and for files of a kind that is not known: these stay in
    the message."""
    head, _, text = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (head[:5].lower() == "data:" and head.lower().endswith(";base64")):
        return None
    try:
        picture = Picture.of(decoded(text))
    except ValueError:
        return None
    return picture if picture.media_type.startswith("image/") else None


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
