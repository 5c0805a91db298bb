"""One request on its way through the gateway, and what becomes of it.

In: what a transport took from the wire. Out: `RawRequest`, the `Exchange` that it begins once it is admitted, `Reply`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sharpen.gateway.caller import Caller
from sharpen.gateway.keys import key_of

RETRY_HEADER, IDEMPOTENCY_HEADER = "x-stainless-retry-count", "idempotency-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """A request as it came: `key` is its rollout's, `retry` how many times the client has already tried, `caller`
    the attempt whose code sent it, where that is known. `idempotency_key`: the same for all tries of one request; empty
    where the client sends none. `in_process`: it came through a client of ours, which says exactly when it gives up."""

    method: str
    path: str
    key: str
    retry: int
    body: bytes
    caller: Caller | None = None
    idempotency_key: str = ""
    in_process: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """One admitted request. `delivered` is set by the transport that handed the response over; where `certain`, the
    agent has it then, else (over HTTP) its client may have gone away in that moment. `ended`: the engine is done with
    it. `repeated`: a retry of it has come."""

    body: bytes = b""
    retry: int = 0
    idempotency_key: str = ""
    certain: bool = True
    ended: bool = False
    delivered: bool = False
    repeated: bool = False
    abandoned: bool = False
    foreign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A response on its way: status, content type, body, and the exchange that is delivered when the agent has it."""

    status: int
    content_type: str
    body: bytes
    exchange: Exchange | None = None

    def delivered(self) -> None:
        """The response is in the agent's hands."""
        if self.exchange is not None:
            self.exchange.delivered = True


Start = Callable[[RawRequest], "asyncio.Task[Reply]"]


def raw_request(
    method: str, path: str, headers: Any, body: bytes, caller: Caller | None, *, in_process: bool
) -> RawRequest:
    """Read what matters of a request's headers (any mapping that ignores case)."""
    retry = headers.get(RETRY_HEADER, "0")
    return RawRequest(
        method=method,
        path=path,
        key=key_of(headers),
        retry=int(retry) if retry.isdecimal() and len(retry) < 10 else 0,
        body=body,
        caller=caller,
        idempotency_key=headers.get(IDEMPOTENCY_HEADER, ""),
        in_process=in_process,
    )
