"""The routes that are served, and the error for any other.

In: method and path. Out: the route, the protocol of its requests, or a 404 that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sharpen.gateway.answers import Writer
from sharpen.gateway.context import Context
from sharpen.gateway.protocols import chat, completions, messages, responses
from sharpen.gateway.requests import ApiError, CallRequest

Route = tuple[str, str]
Parse = Callable[[Any, Context], tuple[CallRequest, Writer]]

CHAT, COMPLETIONS, MODELS = ("POST", "/chat/completions"), ("POST", "/completions"), ("GET", "/models")
HEALTH = frozenset({("HEAD", "/"), ("GET", "/"), ("GET", "/health")})
"""Answered without a key: that somebody listens."""
RESPONSES = ("POST", "/responses")
INPUT_ITEMS = "/input_items"
"""The end of the path at which the input of a stored response is read."""
MESSAGES, COUNT_TOKENS = ("POST", "/messages"), ("POST", "/messages/count_tokens")
PARSERS: Mapping[Route, Parse] = {
    CHAT: chat.parse_request,
    COMPLETIONS: completions.parse_request,
    RESPONSES: responses.parse_request,
    MESSAGES: messages.parse_request,
}
"""The protocol of each route whose requests are calls of the model."""
OTHER_APIS = {
    "/embeddings": "embeddings are not served; ask another server for them",
    "/api/chat": "the client speaks Ollama's API; have it speak OpenAI's chat completions",
}
"""By the end of a path: which API it belongs to, and what to do."""


def route_of(method: str, path: str) -> Route:
    """Return a request's method, and its path without a leading `/v1`."""
    return method, path.rstrip("/").removeprefix("/v1")


def response_id(route: Route) -> str | None:
    """Return the id of the stored response that a route asks for or deletes, or whose input it asks for."""
    method, path = route
    name = path.removeprefix("/responses/")
    if method == "GET":
        name = name.removesuffix(INPUT_ITEMS)
    return name if method in ("GET", "DELETE") and name not in ("", path) and "/" not in name else None


def models_body(model: str) -> dict[str, Any]:
    """Return the body that lists the one model served, for the clients of both vendors."""
    return {"object": "list", "data": [model_body(model)], "has_more": False, "first_id": model, "last_id": model}


def model_body(model: str) -> dict[str, Any]:
    """Return the body that describes a model, for the clients of both vendors."""
    openai = {"id": model, "object": "model", "created": 0, "owned_by": "sharpen"}
    return {**openai, "type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}


def not_found(method: str, path: str) -> ApiError:
    """Return the 404 for a route that is not served."""
    return ApiError(f"There is no {method} {path[:200]} here: {_remedy(method, path)}.", status=404, code="not_found")


def _remedy(method: str, path: str) -> str:
    _, end = route_of(method, path)
    if end.startswith("/v1/"):
        return "the client adds /v1 itself; give it model.base_url.removesuffix('/v1')"
    for known_method, known in (*PARSERS, COUNT_TOKENS, MODELS):
        if end == known:
            return f"use {known_method}"
        if end.endswith(known):
            return "use model.base_url as the client's base_url, with nothing added to it"
    for known, remedy in OTHER_APIS.items():
        if end.endswith(known):
            return remedy
    served = ", ".join(f"/v1{known}" for _, known in (*PARSERS, MODELS))
    return f"{served} are served, and model.base_url ends in /v1"
