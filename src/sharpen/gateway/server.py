"""The gateway's HTTP server, for code that cannot use an in-process client (LangChain, subprocesses, containers).

In: HTTP requests, each with its rollout's key, on the loopback interface or where the configuration says. Out:
responses. The server starts when a `base_url` is first read, and runs on the serving loop. A client that disconnects
aborts its request. A connection with a known opener serves one request only (see `connections`). A body that is too
large or too slow is refused.
"""

from __future__ import annotations

import asyncio
import threading

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sharpen.config.gateway import GatewayConfig
from sharpen.gateway.caller import Caller, WhoCalls
from sharpen.gateway.connections import Connections
from sharpen.gateway.exchange import Reply, Start, raw_request
from sharpen.gateway.listening import AppServer, url_of
from sharpen.gateway.replies import error_reply, reply_of
from sharpen.gateway.requests import ApiError

START_TIMEOUT_S = 30.0
CLIENT_CLOSED_REQUEST = 499
MAX_BODY_BYTES = 64 << 20
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
        self._start_request = start
        self._who_calls = who_calls
        self._connections: Connections | None = None
        self._loop = loop
        self._lock = threading.Lock()
        self._server: AppServer | None = None
        self._port: int | None = None

    def url(self, host: str | None = None) -> str:
        """Return the base URL, starting the server on the first call. From any thread but the serving loop's.

        `host` is the name by which an agent elsewhere knows this machine. Raises `ConfigError` if the server cannot
        listen where it should, or is not reached by that name.
        """
        with self._lock:
            if self._port is None:
                if asyncio._get_running_loop() is self._loop:
                    raise RuntimeError("base_url was read on the serving loop's thread: read it on another thread")
                listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
                self._port = listening.result(START_TIMEOUT_S)
            return url_of(self._config, self._port, host)

    async def stop(self) -> None:
        """Stop the server if it was started. On the serving loop."""
        if self._server is not None:
            await self._server.stop(read_s=STOP_TIMEOUT_S)
            self._server = None

    async def _listen(self) -> int:
        self._server = AppServer(self._serve, self._config)
        self._connections = Connections(self._server.port, self._who_calls)
        await self._server.start()
        return self._server.port

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application that uvicorn runs: every path and method is the gateway's to answer."""
        response = await self._endpoint(Request(scope, receive))
        await response(scope, receive, send)

    async def _endpoint(self, request: Request) -> Response:
        caller = self._opener(request)
        try:
            body = await read_body(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except ApiError as error:
            return _ReplyResponse(error_reply(error, request.url.path), close=True)
        url = request.url
        raw = raw_request(request.method, url.path, request.headers, body, caller, in_process=False, query=url.query)
        task = self._start_request(raw)
        gone = asyncio.create_task(disconnected(request))
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            task.cancel()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        reply = reply_of(task, raw)
        if reply.stream is not None:
            return _StreamResponse(reply, gone, close=caller is not None)
        gone.cancel()
        return _ReplyResponse(reply, close=caller is not None)

    def _opener(self, request: Request) -> Caller | None:
        """Return whose code opened the connection, if it came from this machine: ports of others mean nothing here."""
        assert self._connections is not None
        server = request.scope.get("server")
        if request.client is None or server is None or request.client.host != server[0]:
            return None
        return self._connections.opener(request.client.port)


async def read_body(request: Request, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Read the body. Raises `ApiError` if it is too large or too slow, `ClientDisconnect` if the client leaves."""
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > MAX_BODY_BYTES:
                    raise ApiError(f"A request has {MAX_BODY_BYTES >> 20} MiB at most.", status=413, code="too_large")
                parts.append(part)
    except TimeoutError:
        reason = f"The request's body did not arrive within {timeout_s:g} s."
        raise ApiError(reason, status=408, code="timeout") from None
    return b"".join(parts)


class _ReplyResponse(Response):
    """A response that is marked as delivered when it is sent to a client that is still connected.

    It is marked before the last byte, since the client may end its rollout as soon as it has that byte. `close`: the
    connection is closed after it.
    """

    def __init__(self, reply: Reply, *, close: bool) -> None:
        headers = {"content-type": reply.content_type, **({"connection": "close"} if close else {})}
        super().__init__(reply.body, status_code=reply.status, headers=headers)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._reply.delivered()
        await super().__call__(scope, receive, send)


class _StreamResponse(Response):
    """A response that is sent chunk by chunk. A client that disconnects (`gone`) aborts it."""

    def __init__(self, reply: Reply, gone: asyncio.Task[None], *, close: bool) -> None:
        super().__init__(status_code=reply.status)
        del self.headers["content-length"]
        self.headers.update({"content-type": reply.content_type, "cache-control": "no-cache"})
        if close:
            self.headers["connection"] = "close"
        self._reply, self._gone = reply, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._reply.stream
        assert stream is not None
        chunks: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._gone.add_done_callback(lambda _: stream.cancel())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            stream.read(lambda chunk, last: chunks.put_nowait((chunk, last)))
            last = False
            while not last:
                chunk, last = await chunks.get()
                if last and not self._gone.done():
                    self._reply.delivered()
                await send({"type": "http.response.body", "body": chunk, "more_body": not last})
        finally:
            stream.cancel()
            self._gone.cancel()


async def disconnected(request: Request) -> None:
    """Return once the client of a request, whose body has been read, has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
