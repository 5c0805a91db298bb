"""The routes that are served, by which protocol, and the error for any other.

In: method and path of a request; the names of protocols that others bring. Out: who reads it, the form of its errors,
or a 404 that says what to do.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.routing import compile_path

from sharpen.config.doors import find_part
from sharpen.errors import ConfigError
from sharpen.gateway.exchange import RawRequest, Reply
from sharpen.gateway.protocols import chat, completions, messages, responses
from sharpen.gateway.protocols.protocol import ClientProtocol, Parse, Route
from sharpen.gateway.replies import JSON_TYPE, anthropic_error, dump, rollout_ended
from sharpen.gateway.requests import ApiError

CHAT, COMPLETIONS, MODELS = ("POST", "/chat/completions"), ("POST", "/completions"), ("GET", "/models")
HEALTH = frozenset({("HEAD", "/"), ("GET", "/"), ("GET", "/health")})
"""Answered without a key: that somebody listens."""
RESPONSES = ("POST", "/responses")
INPUT_ITEMS = "/input_items"
"""The end of the path at which the input of a stored response is read."""
MESSAGES, COUNT_TOKENS = ("POST", "/messages"), ("POST", "/messages/count_tokens")
OTHER_APIS = {
    "/embeddings": "embeddings are not served; ask another server for them",
    "/api/chat": "the client speaks Ollama's API; have it speak OpenAI's chat completions, or name a protocol of your "
    "own in gateway.protocols (docs/use/extending.md)",
}
"""By the end of a path: which API it belongs to, and what to do."""


def models_body(model: str, *adapters: str) -> dict[str, Any]:
    """Return the body that lists the model served, and adapters by name, for the clients of both vendors."""
    names = (model, *adapters)
    listed = [model_body(name) for name in names]
    return {"object": "list", "data": listed, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def model_body(model: str) -> dict[str, Any]:
    """Return the body that describes a model, for the clients of both vendors."""
    openai = {"id": model, "object": "model", "created": 0, "owned_by": "sharpen"}
    return {**openai, "type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}


OPENAI = ClientProtocol(
    name="openai",
    calls={CHAT: chat.parse_request, COMPLETIONS: completions.parse_request, RESPONSES: responses.parse_request},
    pages={MODELS: models_body},
)
ANTHROPIC = ClientProtocol(name="anthropic", calls={MESSAGES: messages.parse_request}, error=anthropic_error)


class Protocols:
    """The protocols of a gateway: ours, and those that others bring, also by their names (`gateway.protocols`).

    Raises `ConfigError` for a name that nobody has, for what is no protocol, and for a route that another one has.
    """

    def __init__(self, brought: Iterable[str | ClientProtocol] = ()) -> None:
        self._brought = tuple(_found(one) if isinstance(one, str) else one for one in brought)
        self._calls: dict[Route, Parse] = {}
        self._pages: dict[Route, Callable[[str], Any]] = {}
        taken: dict[Route, str] = {COUNT_TOKENS: ANTHROPIC.name, **dict.fromkeys(HEALTH, OPENAI.name)}
        for protocol in (OPENAI, ANTHROPIC, *self._brought):
            for route in (*protocol.calls, *protocol.pages):
                if (owner := taken.setdefault(route, protocol.name)) != protocol.name:
                    raise ConfigError(f"gateway.protocols: {protocol.name} has the route {_shown(route)} of {owner}")
            self._calls.update(protocol.calls)
            self._pages.update(protocol.pages)
        self._patterns = [
            (method, compile_path(path)[0], (method, path))
            for method, path in (*self._calls, *self._pages)
            if "{" in path
        ]
        self._paths = [(_anywhere(protocol), protocol) for protocol in (*self._brought, ANTHROPIC)]

    def parser(self, route: Route) -> Parse | None:
        """Return what reads the requests of a route that are calls of the model."""
        return self._calls.get(self._named(route))

    def page(self, route: Route) -> Callable[[str], Any] | None:
        """Return what makes the body of a route that samples nothing."""
        return self._pages.get(self._named(route))

    def refusal(self, error: ApiError, path: str) -> Reply:
        """Return the reply for an error, in the form of the protocol that a path belongs to: else in OpenAI's."""
        whose = next((protocol for paths, protocol in self._paths if paths.search(path)), OPENAI)
        return Reply(status=error.status, content_type=JSON_TYPE, body=dump(whose.error(error)))

    def reply_of(self, task: asyncio.Task[Reply], raw: RawRequest) -> Reply:
        """Return the reply of a finished task. A cancelled task means that its rollout has been closed: a 401."""
        return task.result() if not task.cancelled() else self.refusal(rollout_ended(), raw.path)

    def not_found(self, method: str, path: str) -> ApiError:
        """Return the 404 for a route that is not served."""
        remedy = self._remedy(*route_of(method, path))
        return ApiError(f"There is no {method} {path[:200]} here: {remedy}.", status=404, code="not_found")

    def __iter__(self) -> Iterator[Route]:
        """Yield the routes whose requests are calls of the model."""
        return iter(self._calls)

    def _named(self, route: Route) -> Route:
        """Return a route as it is named."""
        found = (named for method, paths, named in self._patterns if method == route[0] and paths.match(route[1]))
        return next(found, route)

    def _remedy(self, method: str, end: str) -> str:
        if end.startswith("/v1/"):
            return "the client adds /v1 itself; give it model.base_url.removesuffix('/v1')"
        for known_method, known in (*self, COUNT_TOKENS, MODELS):
            if end == known:
                return f"use {known_method}"
            if end.endswith(known):
                return "use model.base_url as the client's base_url, with nothing added to it"
        for known, remedy in OTHER_APIS.items():
            if end.endswith(known):
                return remedy
        served = ", ".join(f"/v1{known}" for _, known in (*self, MODELS))
        return f"{served} are served, and model.base_url ends in /v1"


def _found(name: str) -> ClientProtocol:
    found = find_part("protocols", name, {})
    if not isinstance(found, ClientProtocol):
        raise ConfigError(
            f"gateway.protocols has {name!r}, which is {found!r}: it must be a ClientProtocol (docs/use/extending.md)"
        )
    return found


def _anywhere(protocol: ClientProtocol) -> re.Pattern[str]:
    """Return what finds a protocol's paths in a request's path, whatever stands around them."""
    paths = (compile_path(path)[0].pattern[1:-1] for _, path in (*protocol.calls, *protocol.pages))
    named = (re.sub(r"\?P<\w+>", "?:", path) for path in paths)  # a name may stand in several
    return re.compile(f"({'|'.join(named)})(/|$)")


def _shown(route: Route) -> str:
    return " ".join(route)


OURS = Protocols()


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
