"""The records of one request on its way through the gateway.

In: what a transport received; on the serving loop, the chunks of an answer. Out: `RawRequest`; the `Exchange` of an
admitted request; `Reply`; the `Stream` that gives one reader the chunks in order.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sharpen.gateway.caller import Caller, key_of, without_key, without_name
from sharpen.types import Span

Sink = Callable[[bytes, bool], None]
"""Receives each chunk, and whether it is the last."""


class Stream:
    """A response in the making. Every method runs on the serving loop.

    `begun` is set with the first chunk. `complete`: the last chunk is there and ends a whole answer, not an error.
    `task` makes the chunks; it is set by whoever starts it.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.complete = False
        self.task: asyncio.Task[None] | None = None
        self._waiting: list[tuple[bytes, bool]] = []
        self._sink: Sink | None = None

    def push(self, chunk: bytes) -> None:
        """Add a chunk."""
        if chunk:
            self._give(chunk, last=False)
            self.begun.set()

    def end(self, chunk: bytes, *, complete: bool) -> None:
        """Add the last chunk."""
        self.complete = complete
        self._give(chunk, last=True)
        self.begun.set()

    def read(self, sink: Sink) -> None:
        """Give all chunks so far, and each later one, to `sink`."""
        self._sink = sink
        waiting, self._waiting = self._waiting, []
        for chunk, last in waiting:
            sink(chunk, last)

    def cancel(self) -> None:
        """Stop sampling: the reader has gone."""
        if self.task is not None:
            self.task.cancel()

    def _give(self, chunk: bytes, *, last: bool) -> None:
        if self._sink is None:
            self._waiting.append((chunk, last))
        else:
            self._sink(chunk, last)


RETRY_HEADER, IDEMPOTENCY_HEADER = "x-stainless-retry-count", "idempotency-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """A request as received.

    `key` identifies its rollout, and `agent` its agent, if that has a name. `retry` counts the client's earlier tries.
    `caller` is the attempt whose code sent it, if known. `idempotency_key` is shared by all tries of one request; empty
    if the client sends none. `in_process` says that it came through one of our own clients, which report exactly when
    they give up. `beta`: it has Anthropic's header for features that are not settled. `span`: the agent's own,
    that it was made in.
    """

    method: str
    path: str
    key: str
    retry: int
    body: bytes
    caller: Caller | None = None
    idempotency_key: str = ""
    in_process: bool = False
    agent: str = ""
    beta: bool = False
    query: str = ""
    span: Span | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """One admitted request and its state.

    `delivered` is set by the transport that handed over the response. If `certain`, the agent has it then; otherwise
    (over HTTP) its client may have disconnected at that moment. `ended`: the engine is done with it. `repeated`: the
    client has retried it. `foreign`: another rollout's code made it. `span` is that of `Call`.
    """

    body: bytes = b""
    retry: int = 0
    idempotency_key: str = ""
    certain: bool = True
    ended: bool = False
    delivered: bool = False
    repeated: bool = False
    abandoned: bool = False
    foreign: bool = False
    span: Span | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A response to be sent, and the exchange to mark as delivered when the agent has it. With a `stream`, the body is
    its chunks, and the response is there when the last one is."""

    status: int
    content_type: str
    body: bytes = b""
    exchange: Exchange | None = None
    stream: Stream | None = None

    def delivered(self) -> None:
        """Mark the exchange as delivered: the agent has the response, or the last chunk of the stream."""
        if self.exchange is not None and (self.stream is None or self.stream.complete):
            self.exchange.delivered = True


Start = Callable[[RawRequest], "asyncio.Task[Reply]"]


def raw_request(
    method: str, path: str, headers: Any, body: bytes, caller: Caller | None, *, in_process: bool, query: str = ""
) -> RawRequest:
    """Make a `RawRequest`, reading key, retry count and span from `headers` (any case-insensitive mapping).

    A key in the path counts before one in the headers: clients that cannot be given a key may send one of their own.
    With `in_process`, the running code is the agent's, and so is a span that is active.
    """
    key, path = without_key(path)
    key, agent = without_name(key or key_of(headers))
    retry = headers.get(RETRY_HEADER, "0")
    return RawRequest(
        method=method,
        path=path,
        key=key,
        retry=int(retry) if retry.isdecimal() and len(retry) < 10 else 0,
        body=body,
        caller=caller,
        idempotency_key=headers.get(IDEMPOTENCY_HEADER, ""),
        in_process=in_process,
        agent=agent,
        beta="anthropic-beta" in headers,
        query=query,
        span=span_of(headers.get(TRACEPARENT, "")) or (active_span() if in_process else None),
    )


# The OpenTelemetry span in which an agent makes a call, so that its traces and the run's records can be read side by
# side.
#
# In: the request's `traceparent` header (W3C Trace Context), which instrumented HTTP clients send; or, in the agent's
# process, the span that is active where the call is made, such as that of an instrumentation of generative AI. Out: a
# `Span`; None if there is none, or if it is not sampled: such a span is never exported. Nothing is imported: where
# OpenTelemetry is not loaded, no span is active.

TRACEPARENT = "traceparent"
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


def span_of(traceparent: str) -> Span | None:
    """Return the span that a header names. One that breaks the standard is passed over, as the standard demands."""
    found = _PARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    return _span(int(trace_id, 16), int(span_id, 16), int(flags, 16))


def active_span() -> Span | None:
    """Return the span that is active in the running code's context."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    return _span(context.trace_id, context.span_id, context.trace_flags)


def _span(trace_id: int, span_id: int, flags: int) -> Span | None:
    if not (trace_id and span_id and flags & _SAMPLED):
        return None
    return Span(trace_id=f"{trace_id:032x}", span_id=f"{span_id:016x}")
