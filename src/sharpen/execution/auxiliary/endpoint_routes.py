"""Where a request for an endpoint may go: to the endpoint's own host, beneath its base URL, by listed routes.

In: the base URL that the owner gave, and what an agent asks for. Out: the URL to send to, or an `ApiError`: then
nothing is sent, and no key is attached.
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
"""What may be asked, by method: paths beneath the base URL. A model's name may have an owner before it."""


def address(base: httpx.URL, method: str, route: str) -> httpx.URL:
    """The URL of a route (`/chat/completions`) of the endpoint at `base`. Raises `ApiError` (404) for others."""
    route = route.rstrip("/")
    listed = ROUTES.get(method)
    if listed is None or not listed.fullmatch(route):
        raise ApiError(f"There is no {method} {route or '/'} at this endpoint: it was not sent.", status=404)
    return base.copy_with(path=base.path.rstrip("/") + route)


def route_of(base: httpx.URL, url: httpx.URL) -> str:
    """The route of a whole URL. Raises `ApiError` if it is not the endpoint's: 403 for another host, 404 for a path
    that is not beneath that of `base`."""
    if _origin(url) != _origin(base):
        raise ApiError(
            f"This client is for {base.host}: a request for {url.host!r} was not sent, nor the key.", status=403
        )
    beneath = base.path.rstrip("/") + "/"
    if not url.path.startswith(beneath):
        raise ApiError(f"There is no {url.path} at this endpoint: its paths begin with {beneath}", status=404)
    return url.path[len(beneath) - 1 :]


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port  # no port: the scheme's own
