"""The routes of an endpoint: requests may go only to listed paths below its base URL, on its own host.

In: the configured base URL, and an agent's request. Out: the URL to send to. On `ApiError` nothing is sent and no key
is attached.
"""

from __future__ import annotations

import re

import httpx

from sharpen.gateway.requests import ApiError

_NAME = r"/(?!\.{1,2}(?:/|$))[\w@:+.-]+"
ROUTES = {
    "POST": re.compile(r"/(?:chat/completions|completions|responses|embeddings|moderations|rerank|score)"),
    "GET": re.compile(rf"/models(?:{_NAME}){{0,3}}"),
}
"""The allowed paths below the base URL, by method. A model's name may have an owner before it."""


def address(base: httpx.URL, method: str, route: str) -> httpx.URL:
    """Return the URL of a route (`/chat/completions`) of the endpoint at `base`. Raises `ApiError` (404) for a route
    that is not listed."""
    route = route.rstrip("/")
    listed = ROUTES.get(method)
    if listed is None or not listed.fullmatch(route):
        raise ApiError(f"There is no {method} {route or '/'} at this endpoint: the request was not sent.", status=404)
    return base.copy_with(path=base.path.rstrip("/") + route)


def route_of(base: httpx.URL, url: httpx.URL) -> str:
    """Return the route of a full URL. Raises `ApiError` if it is not the endpoint's: 403 for another host, 404 for a
    path that is not below that of `base`."""
    if _origin(url) != _origin(base):
        raise ApiError(
            f"This client is for {base.host}: the request for {url.host!r} was not sent, and neither was the key.",
            status=403,
        )
    prefix = base.path.rstrip("/") + "/"
    if not url.path.startswith(prefix):
        raise ApiError(f"There is no {url.path} at this endpoint: its paths begin with {prefix}", status=404)
    return url.path[len(prefix) - 1 :]


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port  # None is the default port of the scheme
