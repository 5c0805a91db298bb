"""The gateway's HTTP server on the loopback interface, for code that cannot use an in-process client (LangChain,
subprocesses).

In: HTTP requests on 127.0.0.1, at a port chosen by the system, each with its rollout's key. Out: responses. The server
starts when a `base_url` is first read, and runs on the serving loop. A client that disconnects aborts its request. A
connection with a known opener serves one request only (see `connections`).
"""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sharpen.gateway.caller import WhoCalls
from sharpen.gateway.connections import Connections
from sharpen.gateway.exchange import Reply, Start, raw_request
from sharpen.gateway.replies import reply_of

START_TIMEOUT_S = 30.0
CLIENT_CLOSED_REQUEST = 499
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""All are answered, most with a 404 that says what to use instead."""


class Server:
    """The HTTP server of a gateway."""

    def __init__(self, start: Start, loop: asyncio.AbstractEventLoop, who_calls: WhoCalls) -> None:
        self._start_request = start
        self._who_calls = who_calls
        self._connections: Connections | None = None
        self._loop = loop
        self._lock = threading.Lock()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url: str | None = None

    def url(self) -> str:
        """Return the base URL, starting the server on the first call. From any thread but the serving loop's."""
        with self._lock:
            if self._url is None:
                if asyncio._get_running_loop() is self._loop:
                    raise RuntimeError("base_url was read on the serving loop's thread: read it on another thread")
                listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
                self._url = listening.result(START_TIMEOUT_S)
            return self._url

    async def stop(self) -> None:
        """Stop the server if it was started. On the serving loop."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        self._server = self._serving = None

    async def _listen(self) -> str:
        app = Starlette(routes=[Route("/{path:path}", self._endpoint, methods=METHODS)])
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self._connections = Connections(listener.getsockname()[1], self._who_calls)
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await asyncio.sleep(0.001)
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    async def _endpoint(self, request: Request) -> Response:
        assert self._connections is not None
        caller = self._connections.opener(request.client.port) if request.client is not None else None
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        raw = raw_request(request.method, request.url.path, request.headers, body, caller, in_process=False)
        task = self._start_request(raw)
        gone = asyncio.create_task(_disconnected(request))
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            task.cancel()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        reply = reply_of(task, raw)
        if reply.stream is not None:
            return _StreamResponse(reply, gone, close=caller is not None)
        gone.cancel()
        return _ReplyResponse(reply, close=caller is not None)


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


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
