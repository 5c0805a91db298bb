"""Where an HTTP server listens, by which URLs it is reached, and its connections with their bounds.

In: the section `gateway` of the configuration; an ASGI application. Out: a server of it that listens there; the URL for
agents here, and elsewhere.

A connection is uvicorn's over llhttp (`httptools`), with the bounds that it lacks: on a request's headers and whatever
else stands between the parts of its body (chunk extensions, trailers), on the time that headers take to arrive, and on
the number of connections. Bodies are bounded where they are read (`server.read_body`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import sys
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from sharpen.agent.sandbox.local import files_at_first
from sharpen.config.sections import GatewayConfig
from sharpen.errors import ConfigError
from sharpen.gateway.replies import send_whole
from sharpen.gateway.requests import ApiError, short_repr
from sharpen.gateway.routes import OURS

HEAD_TIMEOUT_S = 60.0
"""How long a request's headers may take to arrive, from the connection or their first byte on."""
MAX_AHEAD = 8
"""How many requests a client may send before it has been answered; it is read again after that."""
BUSY = b"This server has all the connections that it takes: try again later."
_TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BUSY), BUSY)
)


def raise_file_limit(bounds: GatewayConfig) -> None:
    """Let this process open as many files as it needs for all connections (`ulimit -n`), up to what it may have itself
    (`ulimit -Hn`): systems start programs with 1,024."""
    files_at_first()  # what commands of the agent keep
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * bounds.max_connections if hard == resource.RLIM_INFINITY else min(2 * bounds.max_connections, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpProtocol(HttpToolsProtocol):
    """The protocol of one connection. `bounds`: what it may send."""

    _waiting: asyncio.TimerHandle | None = None
    """Ends the connection unless headers are complete by then."""
    _idle_bytes = 0
    """What came since the last request, body or end of headers."""
    _answered: RequestResponseCycle | None = None
    """The request that is being answered, or was last; `cycle` is the one that came last."""
    _moved = False
    """Whether what came last had a body's part, or the end of headers or of a request."""

    def __init__(self, bounds: GatewayConfig, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._max_header_bytes = bounds.max_header_kb << 10
        self._max_connections = connection_limit(bounds)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to serve a client; refuse it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what the connection began."""
        self._end_wait()
        if self._answered is not None and self._answered is not self.cycle:
            self._answered.disconnected = not self._answered.response_complete
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came. Closes the connection, with an error, for what is no HTTP, and once headers are too long."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._idle_bytes += len(data)
        self._moved = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._moved:
            self._idle_bytes = 0
        elif self._idle_bytes > self._max_header_bytes:
            self.send_400_response("The request's headers are too long.")
            return
        if self._waiting is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_headers()  # also for the rest of a body whose request was refused

    def _stay(self, rest: bytes) -> None:
        """Answer a request that asks for another protocol (HTTP/2, by Java's client) as if it did not: the parser would
        skip its body."""
        if self.parser.get_method() == b"CONNECT":
            self.send_400_response("There is nothing to connect to here.")
            return
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._idle_bytes = 0
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def on_headers_complete(self) -> None:
        """Begin a request. Raises `ValueError` for headers that are too long, which came at once."""
        self._moved = True
        self._end_wait()
        if self._idle_bytes > self._max_header_bytes:
            num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if num_bytes > self._max_header_bytes:
                raise ValueError(f"the request's headers have {num_bytes} bytes")
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            if 0 < len(self.pipeline) < MAX_AHEAD:
                self.flow.resume_reading()  # which uvicorn has paused: the end of the connection would go unnoticed

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._moved = True
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Begin to answer a request."""
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _wait_for_headers(self) -> None:
        self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def connection_limit(bounds: GatewayConfig) -> int:
    """Return how many connections are taken: as many as are set, but no more than half of the files that this process
    may open, so that it can always open others."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return bounds.max_connections if files == resource.RLIM_INFINITY else min(bounds.max_connections, files // 2)


logger = logging.getLogger(__name__)
BACKLOG = 2048
POLL_S = 0.002
"""How often a server that ends looks whether its connections have."""


class AppServer:
    """Serves an application on the running event loop, by connections of uvicorn, whose own server asks ten times a
    second whether it should end, and takes the process' signals.

    Raises `ConfigError` if it cannot listen where it should.
    """

    def __init__(
        self, app: ASGIApp, config: GatewayConfig, *, log_level: str = "warning", grace_s: float | None = None
    ) -> None:
        raise_file_limit(config)
        self._listener = listen(config)
        self.port: int = self._listener.getsockname()[1]
        self._state = ServerState()
        of_uvicorn = uvicorn.Config(
            without_web_pages(app, config),
            log_level=log_level,
            access_log=False,
            lifespan="off",
            ws="none",
            interface="asgi3",
            proxy_headers=False,  # else a client could say that it is on another machine (see `Server._opener`)
        )
        self._connect = functools.partial(
            HttpProtocol, config, config=of_uvicorn, server_state=self._state, app_state={}
        )
        self._load = of_uvicorn.load
        self._grace_s = grace_s
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to serve."""
        self._load()
        self._server = await asyncio.get_running_loop().create_server(
            self._connect, sock=self._listener, backlog=BACKLOG
        )

    async def stop(self, *, read_s: float | None = None) -> None:
        """Refuse new connections, wait for what is running (at most `grace_s`, if that is given), and end. With
        `read_s`, clients have so long to read what was sent to them; then their connections are cut."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for connection in list(self._state.connections):
            connection.shutdown()  # at once, or at the end of its answer
        if read_s is not None and not await self._ended(read_s):
            for connection in list(self._state.connections):
                connection.transport.abort()
        if not await self._ended(self._grace_s):
            for task in self._state.tasks:
                task.cancel()

    async def _ended(self, within_s: float | None) -> bool:
        """Return whether every connection and answer ends within a time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._state.connections or self._state.tasks:
                    await asyncio.sleep(POLL_S)
        return not (self._state.connections or self._state.tasks)


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
