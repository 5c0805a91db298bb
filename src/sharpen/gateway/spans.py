"""The OpenTelemetry span in which an agent makes a call, so that its traces and the run's records can be read side by
side.

In: the request's `traceparent` header (W3C Trace Context), which instrumented HTTP clients send; or, in the agent's
process, the span that is active where the call is made, such as that of an instrumentation of generative AI. Out: a
`Span`; None if there is none, or if it is not sampled: such a span is never exported. Nothing is imported: where
OpenTelemetry is not loaded, no span is active.
"""

from __future__ import annotations

import re
import sys

from sharpen.types import Span

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
