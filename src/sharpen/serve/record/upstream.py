"""The server whose answers are recorded: how requests get there, and what it can.

In: requests as they were received. Out: its replies, whose bodies are still to be read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx

from sharpen.config.secrets import hide_in_value
from sharpen.errors import ConfigError
from sharpen.gateway.caller import OTHER_HEADERS
from sharpen.gateway.requests import ApiError

Headers = Sequence[tuple[str, str]]
CONNECT_S = 10.0
"""How long a connection may take. What a connected server takes for its answer is its own affair."""
_OF_CONNECTIONS = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "trailers"),
        *("transfer-encoding", "upgrade", "host", "content-length"),
    }
)
"""Headers that belong to one connection, and are not forwarded."""
_KEYS = frozenset({"authorization", *OTHER_HEADERS})
_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[\w@:+.~!$&'()*,;=-]+)+/?", re.ASCII)
"""A path as it is joined to a base URL: names one below the other, none of which climbs, is empty or is encoded."""


class Upstream:
    """An OpenAI-compatible server at `url`, as its clients have it as their base URL; `key` is sent for calls that came
    with a session's key or the recorder's own, below that URL and nowhere else. On one event loop."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = base_url(url)
        self._key = key
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, follow_redirects=False)

    @property
    def shown(self) -> str:
        """The URL as it may be written and told: without a name and a password in it."""
        return hide_in_value(self.url)

    def target(self, path: str, query: str) -> httpx.URL:
        """Return where a request goes: the URL takes the place of our `/v1`. Raises `ApiError` (404) for a path that
        could lead elsewhere: nothing is sent then."""
        if not _PATH.fullmatch(path):
            raise ApiError(f"There is no {path[:100]!r} here: the request was not sent.", status=404)
        base = httpx.URL(self.url).copy_with(userinfo=b"")
        if path == "/v1" or path.startswith("/v1/"):
            whole = base.path + path[3:]
        else:
            whole = base.path.removesuffix("/v1") + path
        return base.copy_with(path=whole, query=query.encode("latin-1") or None)

    async def send(
        self, method: str, target: httpx.URL, headers: Headers, body: bytes, *, own_key: bool, plain: bool
    ) -> httpx.Response:
        """Send a request; the body of the reply is still to be read, and the reply to be closed.

        `own_key`: the key in its headers is ours. `plain`: the reply must not be compressed. Raises `ApiError` if the
        server cannot be reached or breaks off.
        """
        without = (_KEYS if own_key else frozenset()) | ({"accept-encoding"} if plain else frozenset())
        kept = [(name, value) for name, value in forwarded(headers) if name not in without]
        if own_key and self._key is not None and self._is_below(target):
            kept.append(("authorization", f"Bearer {self._key}"))
        if plain:
            kept.append(("accept-encoding", "identity"))
        request = httpx.Request(method, target, headers=kept, content=body or None)
        url = httpx.URL(self.url)
        auth = httpx.BasicAuth(url.username, url.password) if url.userinfo and self._is_below(target) else None
        try:
            return await self._client.send(request, stream=True, auth=auth)
        except httpx.HTTPError as error:
            raise unreachable(self.shown, error) from error

    def _is_below(self, target: httpx.URL) -> bool:
        base = httpx.URL(self.url)
        same = (target.scheme, target.host, target.port) == (base.scheme, base.host, base.port)
        return same and f"{target.path}/".startswith(f"{base.path}/")

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()


def base_url(url: str) -> str:
    """Return a server's base URL; of one without a path it ends in /v1. Raises `ConfigError` for what is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(
            f"--upstream is {hide_in_value(url)!r}; it must be a base URL such as http://127.0.0.1:8000/v1"
        )
    return url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"


def forwarded(headers: Headers) -> list[tuple[str, str]]:
    """Return the headers that go on to the other side, with small names."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in pairs if name == "connection" for part in value.split(",")}
    return [(name, value) for name, value in pairs if name not in _OF_CONNECTIONS | named]


def unreachable(url: str, error: Exception) -> ApiError:
    """Return the error for a request that got no answer."""
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ApiError(f"The server {url} gave no answer ({why}).", status=502, code="upstream", kind="server_error")
