"""Exports of Langfuse and LangSmith: the calls of a model in them, and by what they were judged.

In: rows of an export, or objects of their APIs: of Langfuse observations, traces and scores, in the words of the API or
of an export to a bucket; of LangSmith runs. Out: sessions: a trace is one. What is no call of a model (steps of the
program, tools) is not read: the next call has it in its messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sharpen.errors import DatasetError
from sharpen.serve.interchange.messages import answered, asked, loaded, short, tools_of
from sharpen.serve.interchange.sessions import NOT_READ, Session, call_of, leave_out, number, seconds_of, session_id
from sharpen.serve.record.asked import sampling_of

Record = Mapping[str, Any]
OBSERVATIONS = (
    *("SPAN", "GENERATION", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL"),
)
"""Langfuse's kinds of observations."""


def is_langfuse(record: Record) -> bool:
    """Whether a record is one of Langfuse's: an observation, a score, or a trace that holds both."""
    of_trace = _get(record, "traceId") is not None and "name" in record
    return (of_trace and (record.get("type") in OBSERVATIONS or "value" in record)) or isinstance(
        record.get("observations"), list
    )


def is_langsmith(record: Record) -> bool:
    """Whether a record is a run of LangSmith."""
    return "run_type" in record and ("id" in record or "run_id" in record)


def read_langfuse(records: Iterable[Record], known: dict[str, Session], left_out: Counter[str]) -> None:
    """Add the generations, and what traces were scored. Raises `DatasetError` for what is no export."""
    flat = list(_flat(records))
    observations = [one for one in flat if one.get("type") in OBSERVATIONS]
    for one in sorted(observations, key=lambda one: str(_get(one, "startTime") or "")):
        if one["type"] == "GENERATION":
            _read_generation(one, _session(_get(one, "traceId"), known), left_out)
    for one in flat:
        score = number(one.get("value"))
        if one.get("type") not in OBSERVATIONS and score is not None:
            _session(_get(one, "traceId"), known).scores[str(one.get("name"))] = score


def _flat(records: Iterable[Record]) -> Iterator[Record]:
    for record in records:
        inner = record.get("observations")
        if isinstance(inner, list):
            trace = record.get("id")
            for one in (*inner, *(record.get("scores") or ())):
                if not isinstance(one, Mapping):
                    raise DatasetError(f"the trace {trace} names its observations instead of having them: {short(one)}")
                yield {"traceId": trace, **one}
        else:
            yield record


def _read_generation(one: Record, session: Session, left_out: Counter[str]) -> None:
    if not one.get("output"):
        left_out["calls without an answer"] += 1
        return
    try:
        messages, tools = asked(one.get("input"))
        parameters = loaded(_get(one, "modelParameters"))
        responses = answered(one.get("output"))
        tools = tools or tools_of(_definitions(_get(one, "toolDefinitions")))
    except DatasetError as error:
        leave_out(left_out, NOT_READ, f"observation {one.get('id')}: {error}")
        return
    model = _get(one, "providedModelName") or one.get("model")
    _add(session, messages, tools, responses, parameters, _get(one, "startTime"), _get(one, "endTime"), model)


def _definitions(value: Any) -> list[Any]:
    """Return tools that an export to a bucket has by their names, each as JSON."""
    value = loaded(value)
    if not isinstance(value, Mapping):
        return value if isinstance(value, list) else []
    return [{"name": name, **inner} for name, one in value.items() if isinstance(inner := loaded(one), Mapping)]


def _get(record: Record, name: str) -> Any:
    """Return a field by the API's name, or by an export's: `traceId`, `trace_id`."""
    if record.get(name) is not None:
        return record[name]
    return record.get("".join(f"_{one.lower()}" if one.isupper() else one for one in name))


def read_langsmith(records: Iterable[Record], known: dict[str, Session], left_out: Counter[str]) -> None:
    """Add the runs of models, and the feedback on traces."""
    flat = [one for record in records for one in _with_children(record)]
    for one in sorted(flat, key=lambda one: str(one.get("start_time") or "")):
        id_ = one.get("id") or one.get("run_id")
        session = _session(one.get("trace_id") or id_, known)
        feedback = loaded(one.get("feedback_stats"))
        for name, stats in feedback.items() if isinstance(feedback, Mapping) else ():
            score = number(stats.get("avg")) if isinstance(stats, Mapping) else None
            if score is not None:
                session.scores[str(name)] = score
        if one.get("run_type") == "llm":
            _read_run(one, id_, session, left_out)


def _with_children(record: Record) -> Iterator[Record]:
    yield record
    for child in record.get("child_runs") or ():
        yield from _with_children(child)


def _read_run(one: Record, id_: Any, session: Session, left_out: Counter[str]) -> None:
    outputs = loaded(one.get("outputs"))
    if not outputs or one.get("error"):
        left_out["calls without an answer"] += 1
        return
    extra = loaded(one.get("extra"))
    parameters = extra.get("invocation_params") if isinstance(extra, Mapping) else None
    given: Record = parameters if isinstance(parameters, Mapping) else {}
    inputs = loaded(one.get("inputs"))
    asked_for: Record = inputs if isinstance(inputs, Mapping) else {}
    try:
        messages, tools = asked(inputs)
        responses = answered(outputs)
        tools = tools or tools_of(given.get("tools"))
    except DatasetError as error:
        leave_out(left_out, NOT_READ, f"run {id_}: {error}")
        return
    model = asked_for.get("model") or given.get("model") or given.get("model_name")
    parameters = {**given, **asked_for}
    _add(session, messages, tools, responses, parameters, one.get("start_time"), one.get("end_time"), model)


def _session(trace: Any, known: dict[str, Session]) -> Session:
    id_ = session_id(str(trace))
    return known.setdefault(id_, Session(id=id_))


def _add(
    session: Session,
    messages: list[dict[str, Any]],
    tools: list[Any],
    responses: list[dict[str, Any]],
    parameters: Any,
    start: Any,
    end: Any,
    model: Any,
) -> None:
    given: Record = parameters if isinstance(parameters, Mapping) else {}
    began, ended = seconds_of(start), seconds_of(end)
    first = len(session.calls)
    for response in responses:
        session.calls.append(
            call_of(
                session,
                messages,
                response,
                tools=tools,
                sampling=sampling_of(given),
                model=str(model or ""),
                started=began,
                seconds=max(0.0, ended - began) if began is not None and ended is not None else 0.0,
                request=first if len(responses) > 1 else None,
            )
        )
