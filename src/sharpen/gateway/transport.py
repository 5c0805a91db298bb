"""In-process transports: requests of the vendors' clients are answered on the serving loop, without a socket.

In: a request on any thread or loop, of a client built on httpx or on httpx2. Out: the response, whose body may come
chunk by chunk. An asynchronous client suspends only its task, a synchronous one blocks only its thread; neither waits
on the serving loop's thread, so a synchronous client inside an asynchronous workflow cannot deadlock. A request that is
cancelled, times out or is closed before its last chunk is aborted in the engine, and its call is ABANDONED.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import queue
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sharpen.gateway.caller import Caller, WhoCalls
from sharpen.gateway.exchange import RawRequest, Reply, Start, raw_request
from sharpen.gateway.routes import OURS, Protocols

NO_ANSWER = "no answer within the client's timeout"
NO_CHUNK = "no chunk within the client's timeout"


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


Chunk = tuple[bytes, bool]
"""A part of a stream, and whether it is the last."""
Chunks = TypeVar("Chunks")


@dataclass(frozen=True, slots=True)
class Received(Generic[Chunks]):
    """A reply, and the queue in which the chunks of its stream arrive.

    They are sent after the reply without a request for them, which would have to wait for the end of a decode step.
    """

    reply: Reply
    chunks: Chunks


class _Job:
    """One request on the serving loop; `done` is called there with the reply."""

    def __init__(
        self, start: Start, raw: RawRequest, done: Callable[[Reply], None], protocols: Protocols = OURS
    ) -> None:
        self._start, self._raw, self._done, self._protocols = start, raw, done, protocols
        self._task: asyncio.Task[Reply] | None = None

    def run(self) -> None:
        self._task = self._start(self._raw)
        self._task.add_done_callback(self._finish)

    def cancel(self) -> None:
        """Stop what the request began, also a stream whose reply is on its way to an agent that no longer waits."""
        if self._task is None or self._task.cancel() or self._task.cancelled():
            return
        if (stream := self._task.result().stream) is not None:
            stream.cancel()

    def _finish(self, task: asyncio.Task[Reply]) -> None:
        self._done(self._protocols.reply_of(task, self._raw))


IN_PROCESS_URL = "http://in-process.invalid"
"""It names no host: the requests never leave the process."""


class InProcess:
    """The way of requests to the serving loop and back. All rollouts share it; their keys differ."""

    url = IN_PROCESS_URL

    def __init__(
        self, start: Start, loop: asyncio.AbstractEventLoop, who_calls: WhoCalls, protocols: Protocols = OURS
    ) -> None:
        self._start, self._loop, self._who_calls, self._protocols = start, loop, who_calls, protocols
        self._inbox = Mailbox()
        self._outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()

    def async_client(self, sdk: Any) -> Any:
        """Return an asynchronous HTTP client for a vendor's SDK, on any running loop."""
        library = library_of(sdk)
        asynchronous, _ = _transports(library)
        return library.AsyncClient(transport=asynchronous(self), timeout=None, trust_env=False)

    def sync_client(self, sdk: Any) -> Any:
        """Return a blocking HTTP client for a vendor's SDK, on any thread but the serving loop's."""
        library = library_of(sdk)
        _, synchronous = _transports(library)
        return library.Client(transport=synchronous(self), timeout=None, trust_env=False)

    async def ask(self, request: Any, body: bytes, timeout: float | None) -> Received[asyncio.Queue[Chunk]]:
        """Send a request and await its reply. Raises `TimeoutError`, which aborts it."""
        raw = _raw(request, body, self._who_calls())
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Received[asyncio.Queue[Chunk]]] = loop.create_future()
        outbox = self._outbox(loop)

        def resolve(received: Received[asyncio.Queue[Chunk]]) -> None:
            if not future.done():
                future.set_result(received)

        def post(call: Callable[..., None], *args: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the agent's loop is closed: nothing is delivered
                outbox.post(loop, call, *args)

        def done(reply: Reply) -> None:
            chunks: asyncio.Queue[Chunk] = asyncio.Queue()
            post(resolve, Received(reply, chunks))
            if reply.stream is not None:
                reply.stream.read(lambda chunk, last: post(chunks.put_nowait, (chunk, last)))

        job = _Job(self._start, raw, done, self._protocols)
        self._inbox.post(self._loop, job.run)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except (TimeoutError, asyncio.CancelledError):
            self._inbox.post(self._loop, job.cancel)
            raise

    def ask_blocking(self, request: Any, body: bytes, timeout: float | None) -> Received[queue.SimpleQueue[Chunk]]:
        """Send a request and block this thread until its reply. Raises `TimeoutError`, which aborts it."""
        if asyncio._get_running_loop() is self._loop:
            raise RuntimeError("a synchronous client would block the serving loop; use it on another thread")
        raw = _raw(request, body, self._who_calls())
        future: concurrent.futures.Future[Received[queue.SimpleQueue[Chunk]]] = concurrent.futures.Future()

        def done(reply: Reply) -> None:
            chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
            if reply.stream is not None:
                reply.stream.read(lambda chunk, last: chunks.put((chunk, last)))
            future.set_result(Received(reply, chunks))

        job = _Job(self._start, raw, done, self._protocols)
        self._inbox.post(self._loop, job.run)
        try:
            return future.result(timeout)
        except BaseException:  # also KeyboardInterrupt, or an exception raised into this thread
            self._inbox.post(self._loop, job.cancel)
            raise

    def cancel(self, reply: Reply) -> None:
        """Stop the sampling of a stream that nobody reads any more."""
        if reply.stream is not None:
            self._inbox.post(self._loop, reply.stream.cancel)

    def _outbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        return self._outboxes.setdefault(loop, Mailbox())


def _raw(request: Any, body: bytes, caller: Caller | None) -> RawRequest:
    url = request.url
    query = url.query.decode("latin-1")
    return raw_request(request.method, url.path, request.headers, body, caller, in_process=True, query=query)


def library_of(sdk: Any) -> Any:
    """Return the HTTP library that a vendor's SDK is built on: httpx, or httpx2 in newer versions."""
    modules = (one.__module__.partition(".")[0] for one in sdk.DefaultHttpxClient.__mro__)
    return importlib.import_module(next(name for name in modules if name.startswith("httpx")))


def _chunks(library: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the classes of a streamed response's body, asynchronous and blocking. Closing one before its last chunk
    aborts the call."""

    class AsyncChunks(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, inside: InProcess, received: Received[asyncio.Queue[Chunk]], request: Any) -> None:
            self._inside, self._request = inside, request
            self._reply, self._chunks = received.reply, received.chunks

        async def __aiter__(self) -> AsyncIterator[bytes]:
            last = False
            while not last:
                try:
                    async with asyncio.timeout(_read_timeout(self._request)):
                        chunk, last = await self._chunks.get()
                except TimeoutError as error:
                    raise library.ReadTimeout(NO_CHUNK, request=self._request) from error
                if last:
                    self._reply.delivered()
                yield chunk

        async def aclose(self) -> None:
            self._inside.cancel(self._reply)

    class Chunks(library.SyncByteStream):  # type: ignore[misc]
        def __init__(self, inside: InProcess, received: Received[queue.SimpleQueue[Chunk]], request: Any) -> None:
            self._inside, self._request = inside, request
            self._reply, self._chunks = received.reply, received.chunks

        def __iter__(self) -> Iterator[bytes]:
            last = False
            while not last:
                try:
                    chunk, last = self._chunks.get(timeout=_read_timeout(self._request))
                except queue.Empty as error:
                    raise library.ReadTimeout(NO_CHUNK, request=self._request) from error
                if last:
                    self._reply.delivered()
                yield chunk

        def close(self) -> None:
            self._inside.cancel(self._reply)

    return AsyncChunks, Chunks


@functools.cache
def _transports(library: Any) -> tuple[Callable[[InProcess], Any], Callable[[InProcess], Any]]:
    """Return the classes of asynchronous and blocking transports for clients of this HTTP library."""
    async_chunks, blocking_chunks = _chunks(library)

    def respond(inside: InProcess, received: Received[Any], request: Any, chunks: Callable[..., Any]) -> Any:
        reply = received.reply
        headers = {"content-type": reply.content_type}
        if reply.stream is not None:
            return library.Response(reply.status, headers=headers, stream=chunks(inside, received, request))
        reply.delivered()
        return library.Response(reply.status, headers=headers, content=reply.body)

    class AsyncTransport(library.AsyncBaseTransport):  # type: ignore[misc]
        def __init__(self, inside: InProcess) -> None:
            self._inside = inside

        async def handle_async_request(self, request: Any) -> Any:
            try:
                received = await self._inside.ask(request, await request.aread(), _read_timeout(request))
            except TimeoutError as error:
                raise library.ReadTimeout(NO_ANSWER, request=request) from error
            return respond(self._inside, received, request, async_chunks)

    class Transport(library.BaseTransport):  # type: ignore[misc]
        def __init__(self, inside: InProcess) -> None:
            self._inside = inside

        def handle_request(self, request: Any) -> Any:
            try:
                received = self._inside.ask_blocking(request, request.read(), _read_timeout(request))
            except TimeoutError as error:
                raise library.ReadTimeout(NO_ANSWER, request=request) from error
            return respond(self._inside, received, request, blocking_chunks)

    return AsyncTransport, Transport


def _read_timeout(request: Any) -> float | None:
    timeout = request.extensions.get("timeout", {}).get("read")
    return None if timeout is None else float(timeout)
