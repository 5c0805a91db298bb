"""Where an HTTP server listens, and by which URLs it is reached.

In: the section `gateway` of the configuration; an ASGI application. Out: a server of it that listens there; the URL for
agents here, and elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import sys
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from sharpen.config.sections import GatewayConfig
from sharpen.errors import ConfigError
from sharpen.gateway.http_protocol import HttpProtocol, raise_file_limit
from sharpen.gateway.replies import send_whole
from sharpen.gateway.requests import ApiError, short_repr
from sharpen.gateway.routes import OURS

logger = logging.getLogger(__name__)
BACKLOG = 2048


class AppServer:
    """Serves an application on the running event loop. Raises `ConfigError` if it cannot listen where it should."""

    def __init__(self, app: ASGIApp, config: GatewayConfig, *, log_level: str = "warning", grace_s: int | None = None):
        raise_file_limit(config)
        self._listener = listen(config)
        self.port: int = self._listener.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                without_web_pages(app, config),
                http=cast(Any, functools.partial(HttpProtocol, config)),
                log_level=log_level,
                access_log=False,
                lifespan="off",
                ws="none",
                interface="asgi3",
                proxy_headers=False,  # else a client could say that it is on another machine (see `Server._opener`)
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=grace_s,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.001)

    async def stop(self, *, read_s: float | None = None) -> None:
        """Refuse new connections, wait for what is running (at most `grace_s`, if that is given), and end. With
        `read_s`, clients have so long to read what was sent to them; then their connections are cut."""
        if self._serving is not None:
            self._server.should_exit = True
            if read_s is not None:
                await asyncio.wait({self._serving}, timeout=read_s)
                for connection in list(self._server.server_state.connections):
                    connection.transport.abort()
            await self._serving
            self._serving = None


def listen(config: GatewayConfig) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` if this machine has no such address, or the port is taken."""
    family = socket.AF_INET6 if isinstance(ip_address(config.host), IPv6Address) else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"gateway.host={config.host!r}, gateway.port={config.port}: cannot listen there ({error.strerror}); name "
            "an address of this machine, and a port that is free (0 finds one)"
        ) from error
    # Connections inherit it. Without it the body of an answer waits until the client acknowledges the headers: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not config.is_loopback:
        logger.warning(
            "the gateway listens on %s, port %d (gateway.host): whoever reaches that address and knows a key that is "
            "valid then can call the model; what is sent is not encrypted",
            config.host,
            listener.getsockname()[1],
        )
    return listener


def url_of(config: GatewayConfig, port: int, host: str | None) -> str:
    """Return the base URL of a server at a port: for agents on this machine, or for those that know it as `host`.

    Raises `ConfigError` if the server listens on the loopback alone, and `host` is another machine's name for this one.
    """
    address = ip_address(config.host)
    if host is None:
        loopback = "::1" if isinstance(address, IPv6Address) else "127.0.0.1"
        host = loopback if address.is_unspecified else config.host
    elif config.is_loopback and sys.platform == "linux":  # elsewhere containers reach their host's loopback
        raise ConfigError(
            f"gateway.host is {config.host}, which an agent that knows this machine as {host!r} does not reach: set it "
            "to the address of the containers' network (such as 172.17.0.1), or to 0.0.0.0"
        )
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


# Refusal of requests that come from web pages: the gateway is for programs.
#
# In: a request's headers. Out: a 403 for what a page in the owner's browser sends, be it one of another site, or one
# that had its own name lead to this machine (DNS rebinding).
#
# Browsers say themselves that a page asks: by `Origin` (each request but simple ones for images, scripts and the
# like), by `Sec-Fetch-Site` (those, to this machine), and by `Host`, which has the page's name where that leads here.
# A server on the loopback knows its own names; one for other machines does not, and is protected by the first two.

_OWN = (b"none", b"same-origin")
"""What `Sec-Fetch-Site` says where no page of another site asks: its owner typed the address."""


def without_web_pages(app: ASGIApp, config: GatewayConfig) -> ASGIApp:
    """Return the application as programs see it; web pages are refused."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        reason = refusal(scope["headers"], loopback=config.is_loopback)
        if reason is None:
            await app(scope, receive, send)
        else:
            error = ApiError(reason, status=403, code="web_page", kind="permission_error")
            await send_whole(send, OURS.refusal(error, scope["path"]), close=True)

    return checked


def refusal(headers: Iterable[tuple[bytes, bytes]], *, loopback: bool) -> str | None:
    """Return why a request is not answered; None if it may come from a program. `loopback`: the server listens there
    alone."""
    for name, value in headers:
        if name == b"origin" or (name == b"sec-fetch-site" and value not in _OWN):
            return f"Web pages are not answered ({name.decode()}: {short_repr(value.decode('latin-1'))})."
        if name == b"host" and loopback and not _is_here(value.decode("latin-1")):
            return (
                f"This server listens on the loopback alone, where {short_repr(value.decode('latin-1'))} is not its "
                "name: use localhost or 127.0.0.1, or set gateway.host."
            )
    return None


@functools.lru_cache(64)
def _is_here(authority: str) -> bool:
    """Whether a `Host` may lead to this machine without a page's doing: an address, a name of the loopback, or none at
    all. Names below `internal`, by which containers know their host, are nobody's on the internet."""
    host = authority.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") <= 1:
        host = host.partition(":")[0]
    host = host.removesuffix(".")
    if host in ("", "localhost") or host.endswith((".localhost", ".internal")):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
