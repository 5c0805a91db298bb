"""The front of a server: the requests of applications, each of which needs a session at the gateway.

In: HTTP requests. Out: replies; counts of what was answered. Runs on the serving loop.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from sharpen.errors import EngineLostError
from sharpen.gateway.exchange import RawRequest, Reply
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.memory import Memory
from sharpen.gateway.replies import error_reply, json_reply
from sharpen.gateway.requests import ApiError
from sharpen.gateway.routes import HEALTH, route_of
from sharpen.gateway.session import Session
from sharpen.serve.metrics import CONTENT_TYPE, Metric, Requests, exposition, single
from sharpen.serve.openapi import CALLS

MAX_RUNNING = 1024
"""Requests that are answered at once. Further ones are told to come back later, as the vendors do it."""
MAX_TOOL_CALLS, MAX_RESPONSES = 10_000, 1_000
"""How many tool calls and stored responses a server remembers."""
CANCELLED, OVERLOADED = 499, 503
V = TypeVar("V")


class Entrance(Protocol):
    """Says who may call the model, and gives each request a session."""

    def enter(self, raw: RawRequest) -> Session:
        """Return the session for a request. Raises `ApiError` for a request that has no right to one, and
        `EngineLostError`."""

    def leave(self, session: Session) -> None:
        """The request has been answered, and nothing of it is running."""


class Recent(dict[str, V]):
    """A mapping that forgets its oldest entry beyond `limit`."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._limit:
            del self[next(iter(self))]


class OneKey:
    """Everyone has the same key, and each request a session of its own, of which nothing is kept.

    Satisfies `Entrance`. What requests continue by an id (stored responses, tool calls) is remembered for all together.
    """

    def __init__(self, gateway: Gateway, key: str) -> None:
        self._gateway, self._key = gateway, key
        self._memory = Memory(arguments=Recent(MAX_TOOL_CALLS), responses=Recent(MAX_RESPONSES))

    def enter(self, raw: RawRequest) -> Session:
        """See `Entrance.enter`."""
        check_key(raw.key, self._key)
        session = self._gateway.open("", secrets.randbits(63), record=False)
        session.memory = self._memory
        session.seeds = 0  # equal seeds give equal answers, whoever asks
        return session

    def leave(self, session: Session) -> None:
        """See `Entrance.leave`."""
        session.close()


def check_key(sent: str, key: str) -> None:
    """Raise `ApiError` if a request has another key than this."""
    if not sent:
        raise _unauthorized("This request has no key: send it as 'Authorization: Bearer <key>', or as x-api-key.")
    if not hmac.compare_digest(sent.encode(), key.encode()):
        raise _unauthorized("This server has another key: the one that it printed when it started, or was given.")


def _unauthorized(message: str) -> ApiError:
    return ApiError(message, status=401, code="invalid_api_key", kind="authentication_error")


class Front:
    """Answers the requests of applications. `lost` is set when the engine can serve no more.

    `pages` are further routes, which need the server's `key`, each with what answers it; `further` returns metrics of
    its user's.
    """

    def __init__(
        self,
        gateway: Gateway,
        entrance: Entrance,
        key: str,
        description: Mapping[str, Any],
        pages: Mapping[tuple[str, str], Callable[[RawRequest], Any]] | None = None,
        further: Callable[[], Iterable[Metric]] = tuple,
    ) -> None:
        self.lost = threading.Event()
        self.requests = Requests()
        self._gateway, self._entrance, self._key = gateway, entrance, key
        self._description = description
        self._pages, self._further = pages or {}, further
        self._ending = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, raw: RawRequest) -> asyncio.Task[Reply]:
        """Start to answer a request. On the serving loop."""
        task = self._gateway.loop.create_task(self._answer(raw))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self, grace_s: float) -> None:
        """Refuse new requests; wait for those that are running, and after `grace_s` abort them."""
        self._ending = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, raw: RawRequest) -> Reply:
        try:
            if (raw.method, raw.path) in HEALTH:
                return self._health()
            route = route_of(raw.method, raw.path)
            if route == ("GET", "/openapi.json"):
                return json_reply(self._description)
            if route == ("GET", "/metrics"):
                check_key(raw.key, self._key)
                return Reply(status=200, content_type=CONTENT_TYPE, body=self._metrics())
            if route in self._pages:
                check_key(raw.key, self._key)
                page = json_reply(self._pages[route](raw))
                self._count(raw, page.status)
                return page
            if self._ending or self.requests.running >= MAX_RUNNING:
                raise _later("is ending" if self._ending else f"answers {MAX_RUNNING} requests already")
            return await self._call(raw, self._entrance.enter(raw))
        except ApiError as error:
            self._count(raw, error.status)
            return self._gateway.protocols.refusal(error, raw.path)
        except EngineLostError as error:
            self.lost.set()
            self._count(raw, 500)
            return self._gateway.protocols.refusal(ApiError(f"{error}", status=500, kind="server_error"), raw.path)

    async def _call(self, raw: RawRequest, session: Session) -> Reply:
        began, self.requests.running = time.monotonic(), self.requests.running + 1
        self._idle.clear()
        before = dict(session.metrics)

        def ended(status: int) -> None:
            self.requests.running -= 1
            self.requests.seconds += time.monotonic() - began
            for name in ("prompt_tokens", "sampled_tokens"):
                used = int(session.metrics[name] - before[name])
                setattr(self.requests, name, getattr(self.requests, name) + used)
            self._count(raw, status)
            self._entrance.leave(session)
            if self._gateway.lost:
                self.lost.set()
            if not self.requests.running:
                self._idle.set()

        try:
            reply = await self._gateway.start(replace(raw, key=session.model.api_key))
        except BaseException:
            ended(CANCELLED)
            raise
        stream = reply.stream
        if stream is None or stream.task is None:
            ended(reply.status)
            return reply
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)
        stream.task.add_done_callback(
            lambda task: ended(CANCELLED if task.cancelled() else 200 if stream.complete else 500)
        )
        return reply

    def _count(self, raw: RawRequest, status: int) -> None:
        path = f"/v1{route_of(raw.method, raw.path)[1]}"
        self.requests.ended[path if path in CALLS else "other", status] += 1

    def _health(self) -> Reply:
        if self.lost.is_set() or self._ending:
            return error_reply(_later("cannot be called any more"))
        return json_reply({"status": "ok", "model": self._gateway.model_name, "version": self._gateway.engine.version})

    def _metrics(self) -> bytes:
        gateway = self._gateway
        engine = (
            single("policy_version", "gauge", "Updates that the weights have had.", gateway.engine.version),
            single("engine_busy_seconds_total", "counter", "Seconds with a request.", gateway.busy.seconds()),
        )
        return exposition((*self.requests.metrics(), *engine, *self._further()))


def _later(why: str) -> ApiError:
    return ApiError(f"This server {why}.", status=OVERLOADED, code="overloaded", kind="server_error")
