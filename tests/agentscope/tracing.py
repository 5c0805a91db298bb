"""OpenTelemetry as an application sets it up, with the spans kept in memory."""

from __future__ import annotations

import functools
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sharpen.types import Call, Span


@functools.cache
def exporter() -> InMemorySpanExporter:
    """Set tracing up, once for this process: OpenTelemetry takes no second set-up."""
    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


def check_calls_are_linked(calls: tuple[Call, ...], spans: tuple[ReadableSpan, ...]) -> None:
    """Each call is linked to a span of its own, that of the model's answer."""
    chats = [span for span in spans if _attributes(span).get("gen_ai.operation.name") == "chat"]
    assert len(calls) > 1
    assert [call.span for call in calls] == list(map(_link, chats))
    tokens = [_attributes(span)["gen_ai.usage.output_tokens"] for span in chats]
    assert tokens == [len(call.sampled_ids_S) for call in calls]


def _link(span: ReadableSpan) -> Span:
    context = span.get_span_context()
    assert context is not None
    return Span(trace_id=f"{context.trace_id:032x}", span_id=f"{context.span_id:016x}")


def _attributes(span: ReadableSpan) -> Any:
    return span.attributes or {}
