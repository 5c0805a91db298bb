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
from ipaddress import IPv6Address, ip_address
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from sharpen.config.sections import GatewayConfig
from sharpen.errors import ConfigError
from sharpen.gateway.http_protocol import HttpProtocol, raise_file_limit
from sharpen.gateway.web_pages import without_web_pages

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
