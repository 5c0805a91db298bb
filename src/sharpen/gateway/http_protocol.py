"""One HTTP connection of the gateway's server: uvicorn's over llhttp (`httptools`), with the bounds that it lacks.

In: bytes of a client. Out: requests for the application, and its answers. Bounded are a request's headers and whatever
else stands between the parts of its body (chunk extensions, trailers), the time that headers take to arrive, and the
number of connections. Bodies are bounded where they are read (`server.read_body`).
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sharpen.agent.sandbox.local import files_at_first
from sharpen.config.sections import GatewayConfig

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
