"""In-process httpx transports: requests of openai clients are answered on the serving loop, without a socket.

In: an `httpx` request on any thread or loop. Out: an `httpx` response, whose body may come chunk by chunk. The
asynchronous transport suspends only its caller's task, the synchronous one blocks only its caller's thread; neither
waits on the serving loop's thread, so a synchronous client inside an asynchronous workflow cannot deadlock. A request
that is cancelled, times out or is closed before its last chunk is aborted in the engine, and its call is ABANDONED.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from sharpen.gateway.caller import WhoCalls
from sharpen.gateway.exchange import RawRequest, Reply, Start, raw_request
from sharpen.gateway.replies import reply_of


class Mailbox:
    """Runs callables on another thread's loop. Wakes the loop once for all that is posted before it runs them."""

    def __init__(self) -> None:
        self._items: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._scheduled = False

    def post(self, loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
        """Run `call(*args)` on `loop`, which must always be the same. Raises `RuntimeError` if the loop is closed."""
        self._items.append((call, args))
        if self._scheduled:
            return
        self._scheduled = True
        try:
            loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            self._scheduled = False
            self._items.clear()
            raise

    def _drain(self) -> None:
        self._scheduled = False  # set first, so that anything posted from here on wakes the loop again
        while self._items:
            call, args = self._items.popleft()
            call(*args)


class _Job:
    """One request on the serving loop; `done` is called there with the reply."""

    def __init__(self, start: Start, raw: RawRequest, done: Callable[[Reply], None]) -> None:
        self._start, self._raw, self._done = start, raw, done
        self._task: asyncio.Task[Reply] | None = None

    def run(self) -> None:
        self._task = self._start(self._raw)
        self._task.add_done_callback(self._finish)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[Reply]) -> None:
        self._done(reply_of(task, self._raw))


class AsyncTransport(httpx.AsyncBaseTransport):
    """A transport for `openai.AsyncOpenAI`, on any running loop. All rollouts share it; their keys differ."""

    def __init__(self, start: Start, loop: asyncio.AbstractEventLoop, inbox: Mailbox, who_calls: WhoCalls) -> None:
        self._start, self._loop, self._inbox, self._who_calls = start, loop, inbox, who_calls
        self._outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request to the serving loop and await its reply."""
        body, caller = await request.aread(), self._who_calls()
        raw = raw_request(request.method, request.url.path, request.headers, body, caller, in_process=True)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        outbox = self._outboxes.setdefault(loop, Mailbox())

        def resolve(reply: Reply) -> None:
            if not future.done():
                future.set_result(reply)

        def done(reply: Reply) -> None:
            with contextlib.suppress(RuntimeError):  # the agent's loop is closed: the reply is not delivered
                outbox.post(loop, resolve, reply)

        job = _Job(self._start, raw, done)
        self._inbox.post(self._loop, job.run)
        try:
            async with asyncio.timeout(_read_timeout(request)):
                reply = await future
        except TimeoutError as error:
            self._inbox.post(self._loop, job.cancel)
            raise httpx.ReadTimeout("no answer within the client's timeout", request=request) from error
        except asyncio.CancelledError:
            self._inbox.post(self._loop, job.cancel)
            raise
        if reply.stream is None:
            reply.delivered()
            return _response(reply)
        chunks = _AsyncChunks(reply, self._loop, self._inbox, loop, outbox, request)
        return httpx.Response(reply.status, headers={"content-type": reply.content_type}, stream=chunks)

    async def aclose(self) -> None:
        """Do nothing: other rollouts share this transport."""


class SyncTransport(httpx.BaseTransport):
    """A transport for `openai.OpenAI`, on any thread but the serving loop's."""

    def __init__(self, start: Start, loop: asyncio.AbstractEventLoop, inbox: Mailbox, who_calls: WhoCalls) -> None:
        self._start, self._loop, self._inbox, self._who_calls = start, loop, inbox, who_calls

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request to the serving loop and block this thread until its reply."""
        if asyncio._get_running_loop() is self._loop:
            raise RuntimeError("a synchronous client would block the serving loop; use it on another thread")
        body, caller = request.read(), self._who_calls()
        raw = raw_request(request.method, request.url.path, request.headers, body, caller, in_process=True)
        future: concurrent.futures.Future[Reply] = concurrent.futures.Future()
        job = _Job(self._start, raw, future.set_result)
        self._inbox.post(self._loop, job.run)
        try:
            reply = future.result(_read_timeout(request))
        except TimeoutError as error:
            self._inbox.post(self._loop, job.cancel)
            raise httpx.ReadTimeout("no answer within the client's timeout", request=request) from error
        except BaseException:  # KeyboardInterrupt, or an exception raised into this thread
            self._inbox.post(self._loop, job.cancel)
            raise
        if reply.stream is None:
            reply.delivered()
            return _response(reply)
        chunks = _SyncChunks(reply, self._loop, self._inbox, request)
        return httpx.Response(reply.status, headers={"content-type": reply.content_type}, stream=chunks)

    def close(self) -> None:
        """Do nothing: other rollouts share this transport."""


class _AsyncChunks(httpx.AsyncByteStream):
    """The chunks of a streamed reply, on the agent's loop. Closing it before the last one aborts the call."""

    def __init__(
        self,
        reply: Reply,
        serving: asyncio.AbstractEventLoop,
        inbox: Mailbox,
        loop: asyncio.AbstractEventLoop,
        outbox: Mailbox,
        request: httpx.Request,
    ) -> None:
        assert reply.stream is not None
        self._reply, self._stream, self._request = reply, reply.stream, request
        self._serving, self._inbox = serving, inbox
        self._chunks: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()

        def sink(chunk: bytes, last: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the agent's loop is closed: nobody reads
                outbox.post(loop, self._chunks.put_nowait, (chunk, last))

        inbox.post(serving, self._stream.read, sink)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        last = False
        while not last:
            try:
                async with asyncio.timeout(_read_timeout(self._request)):
                    chunk, last = await self._chunks.get()
            except TimeoutError as error:
                raise httpx.ReadTimeout("no chunk within the client's timeout", request=self._request) from error
            if last:
                self._reply.delivered()
            yield chunk

    async def aclose(self) -> None:
        self._inbox.post(self._serving, self._stream.cancel)


class _SyncChunks(httpx.SyncByteStream):
    """The chunks of a streamed reply, on the agent's thread. Closing it before the last one aborts the call."""

    def __init__(
        self, reply: Reply, serving: asyncio.AbstractEventLoop, inbox: Mailbox, request: httpx.Request
    ) -> None:
        assert reply.stream is not None
        self._reply, self._stream, self._request = reply, reply.stream, request
        self._serving, self._inbox = serving, inbox
        self._chunks: queue.SimpleQueue[tuple[bytes, bool]] = queue.SimpleQueue()
        inbox.post(serving, self._stream.read, lambda chunk, last: self._chunks.put((chunk, last)))

    def __iter__(self) -> Iterator[bytes]:
        last = False
        while not last:
            try:
                chunk, last = self._chunks.get(timeout=_read_timeout(self._request))
            except queue.Empty as error:
                raise httpx.ReadTimeout("no chunk within the client's timeout", request=self._request) from error
            if last:
                self._reply.delivered()
            yield chunk

    def close(self) -> None:
        self._inbox.post(self._serving, self._stream.cancel)


def _read_timeout(request: httpx.Request) -> float | None:
    timeout = request.extensions.get("timeout", {}).get("read")
    return None if timeout is None else float(timeout)


def _response(reply: Reply) -> httpx.Response:
    return httpx.Response(reply.status, headers={"content-type": reply.content_type}, content=reply.body)
