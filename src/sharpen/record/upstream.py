"""The server whose answers are recorded: how requests get there, and what it can.

In: requests as they were received. Out: its replies, whose bodies are still to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx

from sharpen.errors import ConfigError
from sharpen.gateway.keys import OTHER_HEADERS
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


class Upstream:
    """An OpenAI-compatible server at `url`, as its clients have it as their base URL; `key` is sent for calls that came
    with a session's key or the recorder's own. On one event loop."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = base_url(url)
        self._key = key
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, follow_redirects=False)

    def target(self, path: str, query: str) -> str:
        """Return where a request goes: the URL takes the place of our `/v1`."""
        rest = path.removeprefix("/v1")
        base = self.url if rest != path else self.url.removesuffix("/v1")
        return f"{base}{rest}{f'?{query}' if query else ''}"

    async def send(
        self, method: str, target: str, headers: Headers, body: bytes, *, own_key: bool, plain: bool
    ) -> httpx.Response:
        """Send a request; the body of the reply is still to be read, and the reply to be closed.

        `own_key`: the key in its headers is ours. `plain`: the reply must not be compressed. Raises `ApiError` if the
        server cannot be reached or breaks off.
        """
        without = (_KEYS if own_key else frozenset()) | ({"accept-encoding"} if plain else frozenset())
        kept = [(name, value) for name, value in forwarded(headers) if name not in without]
        if own_key and self._key is not None:
            kept.append(("authorization", f"Bearer {self._key}"))
        if plain:
            kept.append(("accept-encoding", "identity"))
        request = httpx.Request(method, target, headers=kept, content=body or None)
        try:
            return await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()


def base_url(url: str) -> str:
    """Return a server's base URL; of one without a path it ends in /v1. Raises `ConfigError` for what is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--upstream is {url!r}; it must be a base URL such as http://127.0.0.1:8000/v1")
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
