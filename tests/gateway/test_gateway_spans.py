"""A call has the OpenTelemetry span of the agent's own that it was made in: of its context, or of the header."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from sharpen.gateway.exchange import span_of
from sharpen.types import Span

USER = [{"role": "user", "content": "hello"}]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{PARENT}-01"


def active(number: int, *, sampled: bool = True) -> Any:
    """Make the span of this number active."""
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return trace.use_span(NonRecordingSpan(SpanContext(0xABC, number, is_remote=False, trace_flags=flags)))


def span(number: int) -> Span:
    return Span(trace_id=f"{0xABC:032x}", span_id=f"{number:016x}")


def test_each_call_has_the_span_that_was_active_where_it_was_made(serve: Any) -> None:
    session = serve("hi").open()

    async def ask(number: int) -> None:
        with active(number):
            await session.model.client.chat.completions.create(model="toy", messages=USER)

    async def agent() -> None:
        await asyncio.gather(ask(1), ask(2))

    asyncio.run(agent())
    with active(3):
        session.model.sync_client.chat.completions.create(model="toy", messages=USER, n=2)
    session.model.sync_client.chat.completions.create(model="toy", messages=USER)
    spans = [call.span for call in session.close()]
    assert set(spans[:2]) == {span(1), span(2)}
    assert spans[2:] == [span(3), span(3), None]


def test_a_span_that_is_not_sampled_is_never_exported_and_leads_nowhere(serve: Any) -> None:
    session = serve("hi").open()
    with active(1, sampled=False):
        session.model.sync_client.chat.completions.create(model="toy", messages=USER)
    assert [call.span for call in session.close()] == [None]


def test_a_call_over_http_has_the_span_of_its_header(serve: Any) -> None:
    """Red with the span that was active where the server was started."""
    session = serve("hi").open()
    headers = {"Authorization": f"Bearer {session.model.api_key}"}
    with active(9), httpx.Client(base_url=session.model.base_url, headers=headers) as http:  # starts the server
        for more in ({"traceparent": HEADER}, {}):
            reply = http.post("/chat/completions", headers=more, json={"model": "toy", "messages": USER})
            assert reply.status_code == 200
    assert [call.span for call in session.close()] == [Span(trace_id=TRACE, span_id=PARENT), None]


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        HEADER.upper(),
        f"00-{TRACE}-{PARENT}-00",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"{HEADER}-more",
        f"{HEADER}\n{HEADER}",
    ],
)
def test_a_header_that_names_no_exported_span_is_passed_over(header: str) -> None:
    assert span_of(header) is None


def test_a_header_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert span_of(f"01-{TRACE}-{PARENT}-09-more") == Span(trace_id=TRACE, span_id=PARENT)
