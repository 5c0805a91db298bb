"""The gateway's HTTP server, for code that cannot use an in-process client (LangChain, subprocesses, containers).

In: HTTP requests, each with its rollout's key, on the loopback interface or where the configuration says. Out:
responses. The server starts when a `base_url` is first read, and runs on the serving loop. A client that disconnects
aborts its request. A connection with a known opener serves one request only (see `caller`). A body that is too
large or too slow is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from sharpen.config.sections import GatewayConfig
from sharpen.gateway.caller import Caller, Connections, WhoCalls
from sharpen.gateway.exchange import RawRequest, Reply, Start, Stream, raw_request
from sharpen.gateway.listening import AppServer, url_of
from sharpen.gateway.replies import head_of, send_whole
from sharpen.gateway.requests import ApiError
from sharpen.gateway.routes import Protocols

START_TIMEOUT_S = 30.0
CLIENT_CLOSED_REQUEST = 499
BODY_TIMEOUT_S = 60.0
"""How long a request's body may take to arrive."""
STOP_TIMEOUT_S = 0.5
"""How long a client may take to read the end of its answer when the server stops."""


class Server:
    """The HTTP server of a gateway."""

    def __init__(
        self,
        start: Start,
        loop: asyncio.AbstractEventLoop,
        who_calls: WhoCalls,
        config: GatewayConfig | None = None,
    ) -> None:
        self._config = config or GatewayConfig()
        self._protocols = Protocols(self._config.protocols)
        self._start_request = start
        self._who_calls = who_calls
        self._connections: Connections | None = None
        self._loop = loop
        self._lock = threading.Lock()
        self._server: AppServer | None = None
        self._port: int | None = None
        self._running: Counter[str] = Counter()

    def url(self, host: str | None = None) -> str:
        """Return the base URL, starting the server on the first call. From any thread but the serving loop's.

        `host` is the name by which an agent elsewhere knows this machine. Raises `ConfigError` if the server cannot
        listen where it should, or is not reached by that name.
        """
        if self._port is None:
            if asyncio._get_running_loop() is self._loop:
                raise RuntimeError("base_url was read on the serving loop's thread: read it on another thread")
            with self._lock:
                if self._port is None:
                    asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_TIMEOUT_S)
        assert self._port is not None
        return url_of(self._config, self._port, host)

    async def stop(self) -> None:
        """Stop the server if it was started. On the serving loop."""
        if self._server is not None:
            await self._server.stop(read_s=STOP_TIMEOUT_S)
            self._server = None

    async def _listen(self) -> None:
        self._server = AppServer(self._serve, self._config)
        self._connections = Connections(self._server.port, self._who_calls)
        self._port = self._server.port  # what answers the first request may read it, on this loop too
        await self._server.start()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application that uvicorn runs: every path and method is the gateway's to answer. What is sent to a client
        that has gone goes nowhere."""
        request = Request(scope, receive)
        caller = self._opener(scope)
        path = scope["path"]
        try:
            body = await read_body(request, self._config.max_body_mb)
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
            query = scope["query_string"].decode("latin-1")
            raw = raw_request(scope["method"], path, headers, body, caller, in_process=False, query=query)
            with self._one_more(raw.key):
                await self._answer(raw, request, send)
        except ClientDisconnect:
            return
        except ApiError as error:
            await send_whole(send, self._protocols.refusal(error, path), close=True)

    @contextlib.contextmanager
    def _one_more(self, key: str) -> Iterator[None]:
        """Count a request of a key for the time of a block. Raises `ApiError` if there are too many."""
        most = self._config.max_requests_per_key
        if self._running[key] >= most:
            raise ApiError(
                f"{most} requests with this key are being answered (gateway.max_requests_per_key): try again later.",
                status=429,
                code="rate_limit_exceeded",
                kind="rate_limit_error",
            )
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    async def _answer(self, raw: RawRequest, request: Request, send: Send) -> None:
        close = raw.caller is not None
        task = self._start_request(raw)
        gone = asyncio.create_task(disconnected(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                task.cancel()
                return
            reply = self._protocols.reply_of(task, raw)
            if reply.stream is not None:
                await _send_stream(send, reply, reply.stream, gone, close=close)
            else:
                await send_whole(send, reply, close=close)
        finally:
            gone.cancel()

    def _opener(self, scope: Scope) -> Caller | None:
        """Return whose code opened the connection, if it came from this machine: ports of others mean nothing here."""
        assert self._connections is not None
        server, client = scope.get("server"), scope.get("client")
        if client is None or server is None or client[0] != server[0]:
            return None
        return self._connections.opener(client[1])


async def read_body(request: Request, max_mb: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Read the body. Raises `ApiError` if it is too large or too slow, `ClientDisconnect` if the client leaves."""
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > max_mb << 20:
                    reason = f"A request has {max_mb} MiB at most (gateway.max_body_mb)."
                    raise ApiError(reason, status=413, code="too_large")
                parts.append(part)
    except TimeoutError:
        reason = f"The request's body did not arrive within {timeout_s:g} s."
        raise ApiError(reason, status=408, code="timeout") from None
    return b"".join(parts)


async def _send_stream(send: Send, reply: Reply, stream: Stream, gone: asyncio.Task[None], *, close: bool) -> None:
    """Send a reply chunk by chunk. A client that disconnects (`gone`) aborts it."""
    chunks: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
    gone.add_done_callback(lambda _: stream.cancel())
    try:
        await send(head_of(reply, [(b"cache-control", b"no-cache")], close=close))
        stream.read(lambda chunk, last: chunks.put_nowait((chunk, last)))
        last = False
        while not last:
            chunk, last = await chunks.get()
            if last and not gone.done():
                reply.delivered()
            await send({"type": "http.response.body", "body": chunk, "more_body": not last})
    finally:
        stream.cancel()


async def disconnected(request: Request) -> None:
    """Return once the client of a request, whose body has been read, has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
