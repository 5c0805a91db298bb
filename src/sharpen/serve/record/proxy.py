"""Forwards requests to the server that serves the model, and records its answers.

In: HTTP requests of applications. Out: the server's replies as they come, streams event by event; the calls, to their
sessions. Only chat completions and completions are recorded; whatever else comes is passed through.

    application ─► proxy ─► upstream
                     │ ▲        │
      sessions ◄─────┘ └────────┘
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from sharpen.gateway.caller import without_key
from sharpen.gateway.exchange import RawRequest, Reply, raw_request
from sharpen.gateway.protocols.protocol import Route
from sharpen.gateway.replies import EVENTS_TYPE, json_reply
from sharpen.gateway.requests import ApiError
from sharpen.gateway.routes import HEALTH, OURS, route_of
from sharpen.gateway.server import CLIENT_CLOSED_REQUEST, disconnected, read_body
from sharpen.serve.front import check_key
from sharpen.serve.metrics import CONTENT_TYPE, Metric, Requests, exposition
from sharpen.serve.record.answer import Answer, data_of, events, is_done
from sharpen.serve.record.asked import ADDED, Asked, ask, dump_as_sent
from sharpen.serve.record.sessions import RecordedSession, RecordedSessions
from sharpen.serve.record.upstream import Headers, Upstream, forwarded, unreachable
from sharpen.types import Call

_REFUSALS = frozenset({400, 422})
"""How a server answers a request with fields that it does not know."""
MAX_WARNINGS = 100


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """A request on its way. `asked`, `session` and `answer` are None if it is not recorded. `status` is what the client
    was told: 499 until it was."""

    raw: RawRequest
    target: httpx.URL
    headers: Headers
    own_key: bool
    began: float
    asked: Asked | None = None
    session: RecordedSession | None = None
    answer: Answer | None = None
    status: int = CLIENT_CLOSED_REQUEST
    recorded: bool = False

    @property
    def route(self) -> Route:
        """Its route."""
        return route_of(self.raw.method, self.raw.path)


class Proxy:
    """The recorder as an ASGI application. `key` is its own; with `open_` calls may come with any other key, of which
    the server is asked what it thinks."""

    def __init__(
        self,
        upstream: Upstream,
        sessions: RecordedSessions,
        key: str,
        description: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        open_: bool,
        max_body_mb: int,
    ) -> None:
        self.requests = Requests()
        self._upstream, self._sessions, self._key, self._open = upstream, sessions, key, open_
        self._max_body_mb = max_body_mb
        self._description, self._say = description, say
        self._said: set[str] = set()
        self._gives_ids: dict[Route, bool] = {}
        """Whether the server gives token ids, by route, since it has answered there."""
        self._pages: Mapping[Route, Callable[[RawRequest], Any]] = {
            ("POST", "/sessions"): sessions.open,
            ("POST", "/feedback"): sessions.rate,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        path = scope["path"]  # not that of `request.url`, which is made from the Host that the client sends
        try:
            body = await read_body(request, self._max_body_mb)
            raw = raw_request(request.method, path, request.headers, body, None, in_process=False)
            page = self._page(raw)
            exchange = None if page is not None else self._enter(request, raw)
        except ClientDisconnect:
            return
        except ApiError as error:
            self._count(route_of(request.method, without_key(path)[1]), error.status)
            exchange, page = None, OURS.refusal(error, path)
        if exchange is None:
            assert page is not None
            await _send_whole(send, page.status, [("content-type", page.content_type)], page.body)
            return
        gone = asyncio.create_task(disconnected(request))
        work = asyncio.create_task(self._forward(exchange, send))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled() and (failure := work.exception()) is not None:
            raise failure

    def metrics(self) -> Iterable[Metric]:
        """Return what was forwarded and recorded."""
        return (*self.requests.metrics(), *self._sessions.metrics())

    def _page(self, raw: RawRequest) -> Reply | None:
        """Return the recorder's own page at a path, if there is one. Raises `ApiError` without its key."""
        route = route_of(raw.method, raw.path)
        if (raw.method, raw.path) in HEALTH:
            return json_reply({"status": "ok", "upstream": self._upstream.shown})
        if route == ("GET", "/openapi.json"):
            return json_reply(self._description)
        if route != ("GET", "/metrics") and route not in self._pages:
            return None
        check_key(raw.key, self._key)
        if route in self._pages:
            page = json_reply(self._pages[route](raw))
            self._count(route, page.status)
            return page
        return Reply(status=200, content_type=CONTENT_TYPE, body=exposition(self.metrics()))

    def _enter(self, request: Request, raw: RawRequest) -> Exchange:
        """Admit a request. Raises `ApiError`."""
        own = raw.key == self._key or self._sessions.has(raw.key)
        if not (own or self._open):
            check_key(raw.key, self._key)
        route = route_of(raw.method, raw.path)
        exchange = Exchange(
            raw=raw,
            target=self._upstream.target(raw.path, request.scope["query_string"].decode("latin-1")),
            headers=request.headers.items(),
            own_key=own,
            began=time.monotonic(),
            asked=ask(route, raw.body, add=self._gives_ids.get(route, True)),
        )
        if exchange.asked is not None:
            exchange.session = self._sessions.enter(raw)
        elif raw.method == "POST" and route not in ADDED:
            self._say_once(f"POST {raw.path[:100]} is passed through, but not recorded: its answers have no token ids")
        self.requests.running += 1
        return exchange

    async def _forward(self, exchange: Exchange, send: Send) -> None:
        try:
            reply = await self._send(exchange)
            try:
                await self._give(exchange, reply, send)
            finally:
                await reply.aclose()
        except ApiError as error:
            exchange.status = error.status
            page = OURS.refusal(error, exchange.raw.path)
            await _send_whole(send, page.status, [("content-type", page.content_type)], page.body)
        finally:
            self._leave(exchange)

    async def _send(self, exchange: Exchange) -> httpx.Response:
        """Return the server's reply. If it refuses a request for what was added to it, the request is sent as it
        was."""
        asked, known = exchange.asked, exchange.route in self._gives_ids
        reply = await self._send_body(exchange)
        if asked is None or not asked.added or known or reply.status_code not in _REFUSALS:
            return reply
        await reply.aclose()
        exchange.asked = ask(exchange.route, exchange.raw.body, add=False)
        reply = await self._send_body(exchange)
        if reply.is_success:
            self._note_ids(exchange, gives=False)
        return reply

    async def _send_body(self, exchange: Exchange) -> httpx.Response:
        asked = exchange.asked
        return await self._upstream.send(
            exchange.raw.method,
            exchange.target,
            exchange.headers,
            exchange.raw.body if asked is None else asked.body,
            own_key=exchange.own_key,
            plain=asked is not None,
        )

    async def _give(self, exchange: Exchange, reply: httpx.Response, send: Send) -> None:
        """Give the client the reply, and note what it says. A server that breaks off breaks off here too."""
        exchange.status = reply.status_code
        headers = forwarded(reply.headers.multi_items())
        if exchange.asked is None or not reply.is_success:
            length = reply.headers.get("content-length")
            more = [] if length is None else [("content-length", length)]
            await self._give_pieces(exchange, reply.aiter_raw(), [*headers, *more], send)
            return
        headers = [pair for pair in headers if pair[0] != "content-encoding"]
        exchange.answer = Answer(exchange.asked)
        if reply.headers.get("content-type", "").startswith(EVENTS_TYPE):
            await self._give_pieces(exchange, self._recorded(exchange, exchange.answer, reply), headers, send)
        else:
            try:
                body = _note_whole(exchange.answer, await reply.aread())
            except httpx.HTTPError as error:
                raise unreachable(self._upstream.shown, error) from error
            self._record(exchange, whole=True)
            await _send_whole(send, reply.status_code, headers, body)

    async def _give_pieces(
        self, exchange: Exchange, pieces: AsyncIterator[bytes], headers: Headers, send: Send
    ) -> None:
        await send(_start(exchange.status, headers))
        try:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx.HTTPError as error:
            exchange.status = 502
            self._say(f"{exchange.raw.path[:100]}: {unreachable(self._upstream.shown, error)}")
            raise BrokenOffError from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _recorded(self, exchange: Exchange, answer: Answer, reply: httpx.Response) -> AsyncIterator[bytes]:
        """Yield the events of a stream as the client gets them."""
        async for event in events(reply.aiter_bytes()):
            if is_done(event):
                self._record(exchange, whole=True)
            if (chunk := data_of(event)) is None:
                yield event
                continue
            before = dump_as_sent(chunk)
            if not answer.add(chunk):
                continue
            after = dump_as_sent(chunk)
            yield event if after == before else b"data: " + after + b"\n\n"
        self._record(exchange, whole=True)

    def _record(self, exchange: Exchange, *, whole: bool) -> None:
        """Record an exchange, once: a whole answer before its last byte is given, so that a client that has it finds
        it recorded."""
        answer, session = exchange.answer, exchange.session
        if session is None or exchange.recorded:
            return
        exchange.recorded = True
        if answer is not None and whole:
            self._note_ids(exchange, gives=answer.has_ids)

        def calls(first: int) -> Iterable[Call]:
            if answer is None:
                return ()
            seconds = time.monotonic() - exchange.began
            started, raw = max(session.opened, time.time() - seconds), exchange.raw
            return answer.calls(
                first, delivered=whole, started=started, seconds=seconds, agent=raw.agent, span=raw.span
            )

        self._sessions.leave(session, "" if answer is None else answer.name, calls)

    def _leave(self, exchange: Exchange) -> None:
        """The exchange is over: count it, and record what came if it was not whole."""
        self._record(exchange, whole=False)
        self.requests.running -= 1
        self.requests.seconds += time.monotonic() - exchange.began
        if (answer := exchange.answer) is not None:
            self.requests.prompt_tokens += answer.num_prompt_tokens
            self.requests.sampled_tokens += answer.num_sampled_tokens
        self._count(exchange.route, exchange.status)

    def _note_ids(self, exchange: Exchange, *, gives: bool) -> None:
        if self._gives_ids.setdefault(exchange.route, gives) or gives:
            self._gives_ids[exchange.route] = self._gives_ids[exchange.route] or gives
            return
        self._say_once(
            f"{self._upstream.shown} gives no token ids at {exchange.raw.path[:100]} (vLLM does, if it is new "
            "enough to know return_token_ids): its calls are recorded as text, without tokens, so that only what "
            "renders messages anew can learn from them (sft, dpo)"
        )

    def _say_once(self, line: str) -> None:
        if line not in self._said and len(self._said) < MAX_WARNINGS:
            self._said.add(line)
            self._say(line)

    def _count(self, route: Route, status: int) -> None:
        self.requests.ended[f"/v1{route[1]}" if route in ADDED else "other", status] += 1


class BrokenOffError(Exception):
    """The server broke off in the middle of an answer."""


def _note_whole(answer: Answer, content: bytes) -> bytes:
    """Note a whole answer, and return it as the client gets it."""
    try:
        body = json.loads(content)
    except ValueError:
        return content
    if not isinstance(body, dict):
        return content
    before = dump_as_sent(body)
    answer.add(body)
    after = dump_as_sent(body)
    return content if after == before else after


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send(_start(status, [*headers, ("content-length", str(len(body)))]))
    await send({"type": "http.response.body", "body": body})


def _start(status: int, headers: Headers) -> dict[str, Any]:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": raw}
