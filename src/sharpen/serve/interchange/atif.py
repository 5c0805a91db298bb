"""Trajectories in Harbor's Agent Trajectory Interchange Format (ATIF), there and back.

In: the groups of a journal; ATIF documents of any version 1. Out: documents of version 1.8; sessions. A document is one
conversation; those of one rollout have its id as `session_id`, and what an earlier one has of the model's answers is
copied context in the next. Ids and logprobs of a call are in its step's metrics. What the format has no place for
(reward, task, how a call was sampled) is in `extra`.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sharpen.errors import DatasetError
from sharpen.serve.interchange.sessions import Session, call_of, leave_out, number, seconds_of, session_id
from sharpen.serve.record.asked import sampling_of
from sharpen.serve.record.rows import LeftOut, Talk, talks
from sharpen.types import Call, Group, Picture, Rollout

VERSION = "ATIF-v1.8"
Document = dict[str, Any]


def documents(groups: Iterable[Group], left_out: LeftOut) -> Iterator[tuple[str, Document]]:
    """Yield a name and a document for each conversation of each rollout, also of those that failed."""
    for group in groups:
        for rollout in group.rollouts:
            for place, talk in enumerate(talks(rollout, left_out, None)):
                yield f"{rollout.id}/{place}", _document(group, rollout, talk, f"{rollout.id}/{place}")


def _document(group: Group, rollout: Rollout, talk: Talk, name: str) -> Document:
    steps: list[Document] = []
    for place, message in enumerate(talk.messages):
        if message.get("role") == "tool" and steps and steps[-1]["source"] == "agent":
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append(_result(message, steps[-1]))
        else:
            steps.append({"step_id": len(steps) + 1, **_step(message, talk, place)})
    calls = [talk.sampled[place] for place in sorted(talk.taught)]
    last = talk.sampled[max(talk.sampled)]
    return {
        "schema_version": VERSION,
        "session_id": rollout.id,
        "trajectory_id": name,
        "agent": {
            "name": last.agent or "agent",
            "version": "unknown",
            **({"model_name": last.model} if last.model else {}),
            **({"tool_definitions": list(talk.tools)} if talk.tools else {}),
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(call.prompt_ids_P) for call in calls),
            "total_completion_tokens": sum(len(call.sampled_ids_S) for call in calls),
            "total_steps": len(steps),
        },
        "extra": {
            "group": group.id,
            "task_id": group.task.id,
            "task": dict(group.task.row),
            "reward": rollout.reward,
            "outcome": rollout.outcome.value,
            "metrics": dict(rollout.metrics),
        },
    }


_SOURCES: Mapping[Any, str] = {"system": "system", "user": "user", "assistant": "agent"}
_PLAIN = {"role", "content", "reasoning_content", "tool_calls"}


def _step(message: Mapping[str, Any], talk: Talk, place: int) -> Document:
    """Return a step but for its number. What no field of a step holds is in `extra`; `extra.role` is a role that the
    format does not know."""
    source = _SOURCES.get(message.get("role"), "user")
    step: Document = {"source": source, "message": _content(message.get("content"))}
    extra = {name: value for name, value in message.items() if name not in _PLAIN and value is not None}
    if message.get("role") not in _SOURCES:
        extra["role"] = message.get("role")
    if source == "agent":
        if message.get("reasoning_content"):
            step["reasoning_content"] = message["reasoning_content"]
        if calls := message.get("tool_calls"):
            step["tool_calls"] = [_tool_call(call, f"call_{place}_{n}") for n, call in enumerate(calls)]
        if place in talk.taught:
            step |= _sampled(talk.sampled[place])
            extra |= _about(talk.sampled[place])
        else:
            step["is_copied_context"] = True
    return {**step, "extra": extra} if extra else step


def _sampled(call: Call) -> Document:
    """What a step says of the call that it was sampled by."""
    metrics: Document = {"prompt_tokens": len(call.prompt_ids_P), "completion_tokens": len(call.sampled_ids_S)}
    if len(call.sampled_ids_S):
        metrics["prompt_token_ids"] = call.prompt_ids_P.tolist()
        metrics["completion_token_ids"] = call.sampled_ids_S.tolist()
        if not bool((call.logprobs_S != call.logprobs_S).any()):  # NaN: the server did not say them
            metrics["logprobs"] = call.logprobs_S.tolist()
    step: Document = {"llm_call_count": 1, **({"metrics": metrics} if len(call.sampled_ids_S) else {})}
    if call.model:
        step["model_name"] = call.model
    if call.started is not None:
        step["timestamp"] = datetime.fromtimestamp(call.started, UTC).isoformat()
    return step


def _about(call: Call) -> Document:
    about: Document = {"call": call.index, "finish_reason": call.finish_reason, "seconds": call.seconds}
    sampling = call.sampling
    about["sampling"] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
    }
    if len(call.versions_S):
        about["policy_versions"] = sorted(set(call.versions_S.tolist()))
    return about


def _content(content: Any) -> Any:
    """Return a message's content as text, or as parts if it has images."""
    if not isinstance(content, list | tuple):
        return "" if content is None else str(content)
    parts = []
    for part in content:
        url = (part.get("image_url") or {}).get("url") if isinstance(part, Mapping) else None
        if isinstance(url, str):
            kind = url[5:].partition(";")[0] if url.startswith("data:") else f"image/{url.rpartition('.')[2].lower()}"
            known = kind if kind in _IMAGES else "image/png"
            parts.append({"type": "image", "source": {"media_type": known, "path": url}})
        else:
            text = part.get("text") if isinstance(part, Mapping) else str(part)
            parts.append({"type": "text", "text": text if isinstance(text, str) else json.dumps(part)})
    return parts


_IMAGES = {"image/jpeg", "image/png", "image/gif", "image/webp"}


def _tool_call(call: Mapping[str, Any], name: str) -> Document:
    """Return a tool call. Its arguments' own text is in `extra` where it is not what their JSON would be written as."""
    function = call.get("function") or {}
    text = function.get("arguments")
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        arguments = None
    known = arguments if isinstance(arguments, dict) else {}
    made = {
        "tool_call_id": str(call.get("id") or name),
        "function_name": str(function.get("name")),
        "arguments": known,
    }
    return made if json.dumps(known, ensure_ascii=False) == text else {**made, "extra": {"arguments": text}}


def _result(message: Mapping[str, Any], step: Mapping[str, Any]) -> Document:
    id_ = message.get("tool_call_id")
    known = any(call["tool_call_id"] == id_ for call in step.get("tool_calls", ()))
    names = _PLAIN | ({"tool_call_id"} if known else set())
    extra = {name: value for name, value in message.items() if name not in names and value is not None}
    result = {**({"source_call_id": id_} if known else {}), "content": _content(message.get("content"))}
    return {**result, "extra": extra} if extra else result


def with_files(document: Document, folder: Path) -> Document:
    """Return a document in whose place its images are: as files in `images` of its folder, where Harbor looks for
    them."""
    observed = (one for step in document["steps"] for one in step.get("observation", {}).get("results", ()))
    contents = [*(step["message"] for step in document["steps"]), *(one["content"] for one in observed)]
    for part in (part for content in contents if isinstance(content, list) for part in content):
        head, _, data = part.get("source", {}).get("path", "").partition(";base64,")
        if data and head.startswith("data:"):
            picture = Picture.of(b64decode(data))
            path = Path("images") / f"{picture.sha256}.{head.rpartition('/')[2]}"
            (folder / path.parent).mkdir(exist_ok=True)
            (folder / path).write_bytes(picture.data)
            part["source"]["path"] = str(path)
    return document


# Back: a document is read as it is meant, a later version's further fields are no harm.


def id_of(document: Mapping[str, Any], name: str) -> str:
    """Return the id of a document's session; `name` stands for an id that it lacks."""
    return session_id(str(document.get("session_id") or document.get("trajectory_id") or name))


def read(
    document: Mapping[str, Any], name: str, folder: Path, known: dict[str, Session], left_out: Counter[str]
) -> None:
    """Add a document's calls to its session in `known`. `name` stands for an id that it lacks; its images are in
    `folder`. Raises `DatasetError` for one that breaks the format."""
    id_ = id_of(document, name)
    session = known.setdefault(id_, Session(id=id_))
    extra = document.get("extra")
    if isinstance(extra, Mapping):
        if (reward := number(extra.get("reward"))) is not None:
            session.scores.setdefault("reward", reward)
        session.task_id = session.task_id or str(extra.get("task_id") or "")
    before = len(session.calls)
    for place, inner in enumerate((document, *(document.get("subagent_trajectories") or ()))):
        if not isinstance(inner, Mapping):
            raise DatasetError(f"subagent_trajectories[{place - 1}] is no object")
        _read_steps(inner, session, folder, left_out)
    left_out["trajectories without an answer of a model"] += len(session.calls) == before


def _read_steps(document: Mapping[str, Any], session: Session, folder: Path, left_out: Counter[str]) -> None:
    version, steps = document.get("schema_version"), document.get("steps")
    if not str(version).startswith("ATIF-v1."):
        raise DatasetError(f"it is of version {version!r}; versions ATIF-v1 are read")
    if not isinstance(steps, Sequence) or not all(isinstance(step, Mapping) for step in steps) or not steps:
        raise DatasetError("it has no list of steps")
    agent = document.get("agent")
    about: Mapping[str, Any] = agent if isinstance(agent, Mapping) else {}
    messages: list[Mapping[str, Any]] = []
    for step in steps:
        place = step.get("step_id")
        try:
            message, observed = _message(step, folder), list(_observed(step, folder))
        except _HasAudio:
            leave_out(left_out, "trajectories from their first audio on", f"{session.id}, step {place}")
            return
        sampled = message["role"] == "assistant" and not step.get("is_copied_context")
        if sampled and step.get("llm_call_count") != 0:  # 0: the agent's program said it
            try:
                session.calls.append(_call(session, step, messages, message, about))
            except (AttributeError, TypeError, ValueError) as error:
                raise DatasetError(f"the metrics of step {place} are none: {error}") from error
        messages += [message, *observed]


class _HasAudio(Exception):
    """A step has audio, which no message here can have."""


def _message(step: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    roles = {"system": "system", "user": "user", "agent": "assistant"}
    source, extra = step.get("source"), step.get("extra")
    if source not in roles:
        raise DatasetError(f"step {step.get('step_id')} has the source {source!r}, not system, user or agent")
    more: Mapping[str, Any] = extra if isinstance(extra, Mapping) else {}
    content = _parts(step.get("message"), folder)
    if source != "agent":
        kept = {name: more[name] for name in ("name", "tool_call_id") if name in more}
        return {"role": str(more.get("role") or roles[source]), "content": content, **kept}
    message = {"role": "assistant", "content": content}
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    if calls := step.get("tool_calls"):
        message["tool_calls"] = [_function(call, step) for call in calls]
    return message


def _function(call: Any, step: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function_name"), str):
        raise DatasetError(f"step {step.get('step_id')} has a tool call without a function_name")
    extra = call.get("extra")
    own = extra.get("arguments") if isinstance(extra, Mapping) else None
    text = own if isinstance(own, str) else json.dumps(call.get("arguments") or {}, ensure_ascii=False)
    function = {"name": call["function_name"], "arguments": text}
    return {"id": str(call.get("tool_call_id") or ""), "type": "function", "function": function}


def _observed(step: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what came back of a step: results of its tool calls, or, without any, what its user would say."""
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, Mapping) else None
    for result in results or ():
        if not isinstance(result, Mapping):
            raise DatasetError(f"step {step.get('step_id')} has an observation whose results are no objects")
        extra = result.get("extra")
        more = dict(extra) if isinstance(extra, Mapping) else {}
        id_ = result.get("source_call_id") or more.pop("tool_call_id", None)
        role = "tool" if id_ is not None or step.get("tool_calls") else "user"
        kept = {"name": more["name"]} if isinstance(more.get("name"), str) else {}
        known = {"tool_call_id": id_} if id_ is not None else {}
        yield {"role": role, "content": _parts(result.get("content"), folder), **known, **kept}


def _parts(content: Any, folder: Path) -> Any:
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = []
    for part in content:
        source = part.get("source") if isinstance(part, Mapping) else None
        if isinstance(source, Mapping):
            if part.get("type") == "audio":
                raise _HasAudio
            parts.append({"type": "image_url", "image_url": {"url": _url(str(source.get("path")), folder)}})
        else:
            parts.append({"type": "text", "text": str(part.get("text")) if isinstance(part, Mapping) else str(part)})
    return parts


def _url(path: str, folder: Path) -> str:
    """Return the URL of an image, of a file what is in it."""
    if "://" in path or path.startswith("data:"):
        return path
    try:
        return Picture.of((folder / path).read_bytes()).data_url
    except OSError as error:
        raise DatasetError(f"its image {path} cannot be read: {error.strerror}") from error


def _call(
    session: Session,
    step: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    message: Mapping[str, Any],
    agent: Mapping[str, Any],
) -> Call:
    metrics, extra = step.get("metrics") or {}, step.get("extra") or {}
    given = extra.get("sampling")
    return call_of(
        session,
        messages,
        message,
        tools=agent.get("tool_definitions") or (),
        ids=(metrics.get("prompt_token_ids") or (), metrics.get("completion_token_ids") or ()),
        logprobs=metrics.get("logprobs") or (),
        sampling=sampling_of(given if isinstance(given, Mapping) else {}),
        finish_reason=str(extra.get("finish_reason")),
        model=str(step.get("model_name") or agent.get("model_name") or ""),
        agent=str(agent.get("name") or ""),
        started=seconds_of(step.get("timestamp")),
        seconds=number(extra.get("seconds")) or 0.0,
    )
