"""`httpx` transports for OpenAI clients that send requests on the event loop of another thread.

In: an `httpx` request on any thread or loop, and the function that sends it on the endpoint's loop. Out: an `httpx`
response whose content streams as it is read. Cancelling a request cancels it on the endpoint's loop too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

import httpx

from sharpen.agent.rollout.user_loop import owner
from sharpen.gateway.caller import Caller
from sharpen.gateway.requests import ApiError
from sharpen.gateway.session import TaskSet

# The routes of an endpoint: requests may go only to listed paths below its base URL, on its own host.
#
# In: the configured base URL, and an agent's request. Out: the URL to send to. On `ApiError` nothing is sent and no key
# is attached.

_NAME = r"/(?!\.{1,2}(?:/|$))[\w@:+.-]+"
ROUTES = {
    "POST": re.compile(r"/(?:chat/completions|completions|responses|embeddings|moderations|rerank|score)"),
    "GET": re.compile(rf"/models(?:{_NAME}){{0,3}}"),
}
"""The allowed paths below the base URL, by method. A model's name may have an owner before it."""


def address(base: httpx.URL, method: str, route: str) -> httpx.URL:
    """Return the URL of a route (`/chat/completions`) of the endpoint at `base`. Raises `ApiError` (404) for a route
    that is not listed."""
    route = route.rstrip("/")
    listed = ROUTES.get(method)
    if listed is None or not listed.fullmatch(route):
        raise ApiError(f"There is no {method} {route or '/'} at this endpoint: the request was not sent.", status=404)
    return base.copy_with(path=base.path.rstrip("/") + route)


def route_of(base: httpx.URL, url: httpx.URL) -> str:
    """Return the route of a full URL. Raises `ApiError` if it is not the endpoint's: 403 for another host, 404 for a
    path that is not below that of `base`."""
    if _origin(url) != _origin(base):
        raise ApiError(
            f"This client is for {base.host}: the request for {url.host!r} was not sent, and neither was the key.",
            status=403,
        )
    prefix = base.path.rstrip("/") + "/"
    if not url.path.startswith(prefix):
        raise ApiError(f"There is no {url.path} at this endpoint: its paths begin with {prefix}", status=404)
    return url.path[len(prefix) - 1 :]


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port  # None is the default port of the scheme


Result = TypeVar("Result")
Content = AsyncGenerator[bytes, None]


class RemoteResponse:
    """A response whose decoded `content` is read later, on the endpoint's loop."""

    def __init__(self, status: int, headers: Mapping[str, str], content: Content) -> None:
        self.status, self.headers, self.content = status, headers, content


Send = Callable[[httpx.Request, Caller | None], Coroutine[Any, Any, RemoteResponse]]
"""(request whose body was read, calling code) -> response."""


class Bridge:
    """Runs coroutines on the endpoint's loop from other threads. `tasks` cancels them when the attempt ends."""

    def __init__(self, send: Send, tasks: TaskSet, loop: asyncio.AbstractEventLoop) -> None:
        self._send, self._tasks, self._loop = send, tasks, loop

    def send(self, request: httpx.Request) -> concurrent.futures.Future[RemoteResponse]:
        """Send a request whose body was read. The future resolves before the response's content is read."""
        return self.start(self._send(request, owner.get()))

    def start(self, code: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Start a coroutine on the endpoint's loop. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(self._tracked(code), self._loop)

    async def _tracked(self, code: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await code
        except asyncio.CancelledError:
            if self._tasks.closed:  # cancelled by the end of the attempt, not by the caller
                raise httpx.ReadError("the rollout has ended") from None
            raise


class RemoteTransport(httpx.AsyncBaseTransport):
    """For `openai.AsyncOpenAI`, on any running loop."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send on the endpoint's loop; the content streams as it is read."""
        await request.aread()
        response = await asyncio.wrap_future(self._bridge.send(request))
        return httpx.Response(response.status, headers=response.headers, stream=_AsyncContent(self._bridge, response))


class SyncRemoteTransport(httpx.BaseTransport):
    """For `openai.OpenAI`, on any thread but the endpoint's own."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send on the endpoint's loop and block this thread until the response starts."""
        request.read()
        response = self._bridge.send(request).result()
        return httpx.Response(response.status, headers=response.headers, stream=_SyncContent(self._bridge, response))


class _AsyncContent(httpx.AsyncByteStream):
    def __init__(self, bridge: Bridge, response: RemoteResponse) -> None:
        self._bridge, self._content = bridge, response.content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while part := await asyncio.wrap_future(self._bridge.start(_next(self._content))):
            yield part

    async def aclose(self) -> None:
        await asyncio.wrap_future(self._bridge.start(_close(self._content)))


class _SyncContent(httpx.SyncByteStream):
    def __init__(self, bridge: Bridge, response: RemoteResponse) -> None:
        self._bridge, self._content = bridge, response.content

    def __iter__(self) -> Iterator[bytes]:
        while part := self._bridge.start(_next(self._content)).result():
            yield part

    def close(self) -> None:
        self._bridge.start(_close(self._content)).result()


async def _next(content: AsyncIterator[bytes]) -> bytes:
    """Return the next non-empty bytes; empty bytes at the end."""
    async for part in content:
        if part:
            return part
    return b""


async def _close(content: Any) -> None:
    await content.aclose()
