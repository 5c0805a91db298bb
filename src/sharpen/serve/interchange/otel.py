"""Spans by OpenTelemetry's semantic conventions for generative AI, as OTLP's JSON, there and back.

In: the groups of a journal; OTLP JSON of any program that notes what its model was asked and answered. Out: a trace for
each rollout: a span `invoke_agent` with a span for each call; sessions. The conventions have no place for token ids:
they are in attributes of our own (`sharpen.prompt_token_ids`, `sharpen.completion_token_ids`, `sharpen.logprobs`). The
reward is an event `gen_ai.evaluation.result`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen import __version__
from sharpen.errors import DatasetError
from sharpen.learning.experience.images import with_data
from sharpen.serve.interchange.messages import loaded, short, tools_of
from sharpen.serve.interchange.sessions import NOT_READ, Session, call_of, leave_out, number, session_id
from sharpen.serve.record.asked import sampling_of
from sharpen.serve.record.rows import LeftOut
from sharpen.types import PROMPT_ROLE, Call, Group, Outcome, Rollout, Span

CHAT, COMPLETION, AGENT = "chat", "text_completion", "invoke_agent"
INPUT, OUTPUT, SYSTEM, TOOLS = (
    *("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.definitions"),
)
EVALUATION, SCORE_NAME, SCORE = (
    *("gen_ai.evaluation.result", "gen_ai.evaluation.name", "gen_ai.evaluation.score.value"),
)
CONVERSATION = "gen_ai.conversation.id"
_REQUEST = "gen_ai.request."
_INTERNAL, _CLIENT, _ERROR = 1, 3, 2
Json = dict[str, Any]


def documents(groups: Iterable[Group], left_out: LeftOut) -> Iterator[tuple[str, Json]]:
    """Yield a name and a document for each rollout with calls that reached the agent."""
    for group in groups:
        for rollout in group.rollouts:
            calls = [call for call in rollout.calls if call.delivered]
            left_out.not_used += len(rollout.calls) - len(calls)
            left_out.trimmed += rollout.trimmed
            if calls and not rollout.trimmed:
                yield rollout.id, _document(group, rollout, calls)


def _document(group: Group, rollout: Rollout, calls: Sequence[Call]) -> Json:
    trace = hashlib.sha256(rollout.id.encode()).hexdigest()[:32]
    root = trace[:16]
    began = rollout.started if rollout.started is not None else (calls[0].started or 0.0)
    ends = [began + rollout.seconds, *((call.started or began) + call.seconds for call in calls)]
    events = []
    if rollout.reward is not None:
        score = _attributes({SCORE_NAME: "reward", SCORE: float(rollout.reward)})
        events.append({"name": EVALUATION, "timeUnixNano": _nanos(max(ends)), "attributes": score})
    attributes: Json = {
        "gen_ai.operation.name": AGENT,
        CONVERSATION: rollout.id,
        "sharpen.task_id": group.task.id,
        "sharpen.group": group.id,
        "sharpen.outcome": rollout.outcome.value,
    }
    span = {
        "traceId": trace,
        "spanId": root,
        "name": AGENT,
        "kind": _INTERNAL,
        "startTimeUnixNano": _nanos(began),
        "endTimeUnixNano": _nanos(max(ends)),
        "attributes": _attributes(attributes),
        "events": events,
        "status": {} if rollout.outcome == Outcome.OK else {"code": _ERROR, "message": rollout.error or ""},
    }
    spans = [span, *(_span(trace, root, rollout, call, began) for call in calls)]
    scope = {"name": "sharpen", "version": __version__}
    resource = {"attributes": _attributes({"service.name": "sharpen"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": spans}]}]}


def _span(trace: str, root: str, rollout: Rollout, call: Call, began: float) -> Json:
    started = call.started if call.started is not None else began
    plain = bool(call.messages) and call.messages[0].get("role") == PROMPT_ROLE
    operation = COMPLETION if plain else CHAT
    span: Json = {
        "traceId": trace,
        "spanId": hashlib.sha256(f"{rollout.id}/{call.index}".encode()).hexdigest()[:16],
        "parentSpanId": root,
        "name": f"{operation} {call.model}".strip(),
        "kind": _CLIENT,
        "startTimeUnixNano": _nanos(started),
        "endTimeUnixNano": _nanos(started + call.seconds),
        "attributes": _attributes(_said(rollout, call, operation)),
        "status": {},
    }
    if call.span is not None:
        span["links"] = [{"traceId": call.span.trace_id, "spanId": call.span.span_id}]
    return span


def _said(rollout: Rollout, call: Call, operation: str) -> Json:
    """Return the attributes of a call's span; those that are None are left out."""
    sampling, has_ids = call.sampling, bool(len(call.sampled_ids_S))
    known = has_ids and not bool((call.logprobs_S != call.logprobs_S).any())  # NaN: not said
    reason = "tool_call" if call.response.get("tool_calls") else call.finish_reason
    response = {**_chat_message(call.response), "finish_reason": reason}
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "sharpen",
        CONVERSATION: rollout.id,
        "gen_ai.request.model": call.model or None,
        "gen_ai.agent.name": call.agent or None,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.max_tokens": sampling.max_tokens or None,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
        "gen_ai.response.finish_reasons": [reason],
        "gen_ai.usage.input_tokens": len(call.prompt_ids_P) if has_ids else None,
        "gen_ai.usage.output_tokens": len(call.sampled_ids_S) if has_ids else None,
        INPUT: _dump([_chat_message(with_data(one, call)) for one in call.messages]),
        OUTPUT: _dump([response]),
        TOOLS: _dump([_definition(tool) for tool in call.tools]) if call.tools else None,
        "sharpen.prompt_token_ids": call.prompt_ids_P.tolist() if has_ids else None,
        "sharpen.completion_token_ids": call.sampled_ids_S.tolist() if has_ids else None,
        "sharpen.logprobs": call.logprobs_S.tolist() if known else None,
    }


def _chat_message(message: Mapping[str, Any]) -> Json:
    """Return a message in the conventions' parts."""
    content, parts = message.get("content"), []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    if message.get("role") == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif isinstance(content, list | tuple):
        parts += map(_part, content)
    elif content:
        parts.append({"type": "text", "content": content})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        about = {"id": call.get("id"), "name": str(function.get("name"))}
        parts.append({"type": "tool_call", **about, "arguments": _arguments(function.get("arguments"))})
    named = {"name": message["name"]} if message.get("name") else {}
    return {"role": message.get("role"), "parts": parts, **named}


def _part(part: Any) -> Json:
    source = part.get("image_url") if isinstance(part, Mapping) else None
    if isinstance(source, Mapping):
        head, _, data = str(source.get("url")).partition(";base64,")
        if data and head.startswith("data:"):
            return {"type": "blob", "modality": "image", "mime_type": head[5:], "content": data}
        return {"type": "uri", "modality": "image", "uri": str(source.get("url"))}
    text = part.get("text") if isinstance(part, Mapping) else part
    return {"type": "text", "content": text if isinstance(text, str) else json.dumps(part)}


def _arguments(text: Any) -> Any:
    """Return arguments as an object if nothing of their text is lost by it, else the text."""
    value = loaded(text)
    return value if json.dumps(value, ensure_ascii=False) == text else text


def _definition(tool: Mapping[str, Any]) -> Json:
    function = tool.get("function")
    return {"type": "function", **function} if isinstance(function, Mapping) else {"name": "", **tool}


def _attributes(values: Mapping[str, Any]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> Json:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64 bits are text in Protobuf's JSON
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _nanos(seconds: float) -> str:
    return str(round(seconds * 1e9))


# Back.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A span: its ids, its attributes, its events' (by their names), and when it was, in nanoseconds since 1970."""

    trace: str
    id: str
    attributes: Mapping[str, Any]
    events: tuple[tuple[str, Mapping[str, Any]], ...]
    start: int
    end: int


def read(spans: Iterable[Mapping[str, Any]], known: dict[str, Session], left_out: Counter[str]) -> None:
    """Add the calls of spans to their sessions in `known`: a conversation's, else a trace's. Raises `DatasetError`."""
    found = sorted(map(_read_span, spans), key=lambda span: span.start)
    by_trace = {one.trace: str(one.attributes[CONVERSATION]) for one in found if one.attributes.get(CONVERSATION)}
    for span in found:
        id_ = session_id(str(span.attributes.get(CONVERSATION) or by_trace.get(span.trace) or span.trace))
        session = known.setdefault(id_, Session(id=id_))
        session.task_id = session.task_id or str(span.attributes.get("sharpen.task_id") or "")
        for name, event in span.events:
            score = number(event.get(SCORE))
            if name == EVALUATION and score is not None:
                session.scores[str(event.get(SCORE_NAME) or "score")] = score
        try:
            _read_call(span, session, left_out)
        except DatasetError as error:
            leave_out(left_out, NOT_READ, f"span {span.id}: {error}")


def spans_of(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the spans of an OTLP document. Raises `DatasetError`."""
    for resource in _list(document, "resourceSpans"):
        for scope in _list(resource, "scopeSpans"):
            yield from _list(scope, "spans")


def _list(value: Any, name: str) -> list[Any]:
    inner = value.get(name, []) if isinstance(value, Mapping) else None
    if not isinstance(inner, list):
        raise DatasetError(f"its {name} is no list: {short(value)}")
    return inner


def _read_span(span: Any) -> _Span:
    try:
        return _Span(
            trace=str(span["traceId"]),
            id=str(span["spanId"]),
            attributes=_read_attributes(span.get("attributes", ())),
            events=tuple(
                (str(event.get("name")), _read_attributes(event.get("attributes", ())))
                for event in span.get("events", ())
            ),
            start=int(span.get("startTimeUnixNano") or 0),
            end=int(span.get("endTimeUnixNano") or 0),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"a span cannot be read ({type(error).__name__}: {error}): {short(span)}") from error


def _read_attributes(attributes: Any) -> dict[str, Any]:
    return {str(one["key"]): _read_value(one.get("value", {})) for one in attributes}


def _read_value(value: Mapping[str, Any]) -> Any:
    for kind, inner in value.items():
        if kind == "arrayValue":
            return [_read_value(one) for one in inner.get("values", ())]
        if kind == "kvlistValue":
            return _read_attributes(inner.get("values", ()))
        return int(inner) if kind == "intValue" else float(inner) if kind == "doubleValue" else inner
    return None


def _read_call(span: _Span, session: Session, left_out: Counter[str]) -> None:
    given = dict(span.attributes)
    for name, event in span.events:
        if name == "gen_ai.client.inference.operation.details":
            given |= event
    operation = given.get("gen_ai.operation.name")
    if operation not in (CHAT, COMPLETION, "generate_content"):
        return
    asked, outputs = loaded(given.get(INPUT)), loaded(given.get(OUTPUT))
    if not isinstance(asked, list) or not isinstance(outputs, list) or not outputs:
        left_out[f"spans of calls without {INPUT} or {OUTPUT} (the program does not note what is said)"] += 1
        return
    begin = loaded(given.get(SYSTEM))
    system = [{"role": "system", "parts": begin}] if isinstance(begin, list) and begin else []
    messages = [message for one in [*system, *asked] for message in _read_message(one)]
    tools = tools_of(given.get(TOOLS))
    reasons = given.get("gen_ai.response.finish_reasons")
    requested = {name.removeprefix(_REQUEST): value for name, value in given.items() if name.startswith(_REQUEST)}
    requested["stop"] = given.get(f"{_REQUEST}stop_sequences")
    first = len(session.calls)
    for place, output in enumerate(outputs):
        response = _read_message({"role": "assistant", **output} if isinstance(output, Mapping) else output)[-1]
        reason = reasons[place] if isinstance(reasons, list) and place < len(reasons) else output.get("finish_reason")
        session.calls.append(
            call_of(
                session,
                messages,
                response,
                tools=tools,
                ids=(given.get("sharpen.prompt_token_ids") or (), given.get("sharpen.completion_token_ids") or ()),
                logprobs=given.get("sharpen.logprobs") or (),
                sampling=sampling_of(requested),
                finish_reason=str(reason),
                model=str(given.get("gen_ai.request.model") or ""),
                agent=str(given.get("gen_ai.agent.name") or ""),
                span=Span(trace_id=span.trace, span_id=span.id),
                started=span.start / 1e9,
                seconds=max(0, span.end - span.start) / 1e9,
                request=first if len(outputs) > 1 else None,
            )
        )


def _read_message(one: Any) -> list[Json]:
    """Return a message of ours; of one with results of several tools as many."""
    if not isinstance(one, Mapping) or not isinstance(one.get("parts"), list):
        raise DatasetError(f"a message has no parts: {short(one)}")
    message: Json = {"role": str(one.get("role")), "content": ""}
    parts: list[Json] = []
    results: list[Json] = []
    for part in one["parts"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts.append({"type": "text", "text": str(part.get("content"))})
        elif kind == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + str(part.get("content"))
        elif kind == "tool_call":
            arguments = part.get("arguments")
            text = arguments if isinstance(arguments, str) else _dump(arguments or {})
            function = {"name": str(part.get("name")), "arguments": text}
            call = {"id": str(part.get("id") or ""), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "tool_call_response":
            response = part.get("response", part.get("result"))
            text = response if isinstance(response, str) else _dump(response)
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": text})
        elif kind in ("blob", "uri") and part.get("modality") == "image":
            url = part.get("uri") or f"data:{part.get('mime_type')};base64,{part.get('content')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            raise DatasetError(f"a part of a message is neither text, nor a tool's, nor an image: {short(part)}")
    if results and not parts:
        return results
    if one.get("name"):
        message["name"] = one["name"]
    is_text = all(part["type"] == "text" for part in parts)
    message["content"] = "".join(part["text"] for part in parts) if is_text else parts
    return [*results, message]
