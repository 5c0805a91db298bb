"""One rollout: what was said, how its calls follow from each other, what came of it.

In: its journal and its key there, the index, the notes. Out: a `RolloutPage`; for one call, `CallTokens`.

Shape suffix: S sampled tokens of a call.
"""

from __future__ import annotations

import json
import shlex
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sharpen.agent.rollout.models import AUXILIARY, GATEWAY
from sharpen.agent.rollout.statistics import own_metrics
from sharpen.agent.transcript import Decode, clean_for_page, pieces
from sharpen.errors import JournalError
from sharpen.learning.experience.entropies import TokenRatios, read_entropies, read_ratios
from sharpen.learning.experience.evidence import read_group_steps, read_rollout_spans
from sharpen.learning.experience.opening import open_journal
from sharpen.learning.experience.reading import read_rollout_from
from sharpen.learning.experience.records import LossSpan
from sharpen.show.view.data.measures import finite
from sharpen.show.view.data.messages import MessageView, Origin, message_view, origins, tool_names
from sharpen.show.view.data.search import KINDS, name_of
from sharpen.show.view.index import Index
from sharpen.show.view.notes import Note
from sharpen.types import Call, FloatArray, Rollout, Task, step_of_group

LOCAL_SERVER = "http://127.0.0.1:8000/v1/chat/completions"
"""Where `sharpen serve` serves a model unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """A call. `messages` are those of its prompt that the call it comes from (`origin`) does not have; `response` is
    the answer. `trained_tokens` carried loss with `advantage` (None: it carried none, for the reason `no_loss`).
    `trace` and `span` are the ids of the agent's own span that made it. `request` is its request as JSON, `curl` a
    command that sends it to a model served by `sharpen serve`."""

    index: int
    agent: str
    model: str
    origin: Origin
    messages: tuple[MessageView, ...]
    response: MessageView
    status: str
    finish_reason: str
    temperature: float
    prompt_tokens: int
    sampled_tokens: int
    versions: tuple[int, int] | None
    mean_logprob: float | None
    seconds: float
    reward: float | None
    step_reward: float | None
    state: str
    trained_tokens: int
    advantage: float | None
    no_loss: str
    tools: tuple[str, ...]
    constraint: str
    trace: str
    span: str
    request: str
    curl: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mate:
    """Another rollout of the same group."""

    name: str
    index: int
    kind: str
    attempt: int
    outcome: str
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The time of a call: `start` counts in seconds from the rollout's own. `lane` is 0, or more for a call that
    overlaps others. `agent` is the number of its agent among the agents of the rollout; `delivered`, whether the agent
    received the answer."""

    call: int
    start: float
    seconds: float
    lane: int
    agent: int
    delivered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """The calls of a rollout on a line of `seconds` seconds, which begins with the rollout. `in_calls` is the time in
    which at least one call ran, `elsewhere` the rest: tools, the judge, the workflow itself. If it is not `recorded`
    when calls began, as in older runs, they are placed one after the other."""

    spans: tuple[Span, ...]
    seconds: float
    lanes: int
    agents: tuple[str, ...]
    in_calls: float
    elsewhere: float
    recorded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """A rollout. `name` is its name in addresses, `previous` and `next` those of its neighbours in the journal.
    `trained_in` are the steps that drew its group, with the reason why they left it out (None: they did not).
    `traceback` is that of the exception that ended it, if one did. `metrics` are the workflow's
    and the judge's, `counts` those of the gateway. `trimmed` says that the run has dropped the text of its calls."""

    name: str
    id: str
    group_id: str
    task: str
    task_row: str
    step: int | None
    place: str
    moment: str
    kind: str
    index: int
    attempt: int
    version: int
    outcome: str
    reward: float | None
    error: str
    traceback: str
    seconds: float
    time_line: TimeLine
    metrics: tuple[tuple[str, float], ...]
    counts: tuple[tuple[str, float], ...]
    trained_in: tuple[tuple[int, str | None], ...]
    calls: tuple[CallView, ...]
    mates: tuple[Mate, ...]
    previous: str | None
    next: str | None
    note: Note | None
    trimmed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """Sampled tokens as text: mostly one, several where a character is spread over them; then `ids`, `logprobs` and the
    others have so many. `advantage` and `weight` are None for a token without loss. `entropies`, of the distributions
    that the trainer saw, are empty for a token that no update was computed on, and in runs that did not record them. So
    are `ratios`, which a truncated distribution has not either; `clipped` says whether the policy loss gave one of the
    tokens no gradient (see `CallEntropies`)."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    entropies: tuple[float, ...]
    ratios: tuple[float, ...]
    clipped: bool
    advantage: float | None
    weight: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTokens:
    """The tokens of one call. `context` is its prompt as text, in two parts: what the call that it comes from had, and
    what is new; `forked_at` counts the prompt ids before a fork (None: it is none), for the `reason`. `problem` says
    why tokens have ids instead of text."""

    call: int
    context: tuple[str, str]
    context_ids: tuple[int, int]
    forked_at: int | None
    reason: str
    tokens: tuple[TokenView, ...]
    problem: str


def rollout_page(index: Index, number: int, note: Note | None) -> RolloutPage | None:
    """Return the page of a rollout by its number; None if its journal has none."""
    with _reading(index, number) as source:
        found = _read(source, number)
        if source is None or found is None:
            return None
        rollout, task, version = found
        kind = _kind(source, number)
        trained_in = _steps(source, rollout) if _trains(kind, number) else []
        losses = _losses(source, rollout, [step for step, _ in trained_in])
        mates = _mates(source, number)
        previous, following = _neighbours(source, number)
    moment, place = _evaluated(rollout) if number % 2 else ("", "training")
    return RolloutPage(
        name=name_of(number),
        id=clean_for_page(rollout.id),
        group_id=clean_for_page(rollout.group_id),
        task=clean_for_page(rollout.task_id),
        task_row=_row_text(task),
        step=step_of_group(rollout.group_id),
        place=place,
        moment=moment,
        kind=KINDS.get(kind, ""),
        index=rollout.index,
        attempt=rollout.attempt,
        version=version,
        outcome=rollout.outcome.value,
        reward=finite(rollout.reward),
        error=clean_for_page(rollout.error or ""),
        traceback=clean_for_page(rollout.traceback or ""),
        seconds=rollout.seconds,
        time_line=time_line(rollout),
        metrics=tuple(own_metrics(rollout.metrics).items()),
        counts=tuple(sorted(pair for pair in rollout.metrics.items() if pair[0].startswith((GATEWAY, AUXILIARY)))),
        trained_in=tuple(trained_in),
        calls=_call_views(rollout, losses, trained=any(left_out is None for _, left_out in trained_in)),
        mates=mates,
        previous=previous,
        next=following,
        note=note,
        trimmed=rollout.trimmed,
    )


def call_tokens(
    index: Index, number: int, call_index: int, decode: Decode | None, problem: str = ""
) -> CallTokens | None:
    """Return the tokens of a call; None if there is no such rollout or call. `problem` says why there is no
    `decode`."""
    with _reading(index, number) as source:
        found = _read(source, number)
        if source is None or found is None or not 0 <= call_index < len(found[0].calls):
            return None
        rollout = found[0]
        trains = _trains(_kind(source, number), number)
        steps = [step for step, _ in _steps(source, rollout)] if trains else []
        spans = [span for span in read_rollout_spans(source, rollout.id, steps[-1:]) if span.call == call_index]
        entropies_S = read_entropies(source, rollout, steps).get(call_index)
        ratios = read_ratios(source, rollout, steps).get(call_index)
    call = rollout.calls[call_index]
    origin = origins(rollout.calls)[call_index]
    prompt = call.prompt_ids_P.tolist()
    cut = min(origin.kept_ids, len(prompt))
    return CallTokens(
        call=call_index,
        context=(_decoded(prompt[:cut], decode), _decoded(prompt[cut:], decode)),
        context_ids=(cut, len(prompt) - cut),
        forked_at=cut if origin.kind == "fork" else None,
        reason="" if rollout.trimmed else origin.reason,
        tokens=tuple(_tokens(call, spans, entropies_S, ratios, decode)),
        problem=problem,
    )


@contextmanager
def _reading(index: Index, number: int) -> Iterator[sqlite3.Connection | None]:
    """Open the journal of a rollout; None if there is none. Raises `JournalError` if it turns out to be damaged."""
    journal = index.folder.evaluations if number % 2 else index.folder.journal
    if not journal.exists():
        yield None
        return
    with closing(open_journal(journal)) as source:
        try:
            yield source
        except (sqlite3.Error, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise JournalError(f"{journal.name} is damaged: rollout {number // 2} cannot be read ({error})") from error


def _read(source: sqlite3.Connection | None, number: int) -> tuple[Rollout, Task, int] | None:
    """Return a rollout, its task, the version that it started at. What stands where a message should be becomes one."""
    found = None if source is None else read_rollout_from(source, number // 2)
    if found is None:
        return None
    rollout, task, version = found
    return replace(rollout, calls=tuple(map(_with_messages, rollout.calls))), task, version


def _with_messages(call: Call) -> Call:
    if all(isinstance(message, Mapping) for message in (*call.messages, call.response)):
        return call
    messages = tuple(
        message if isinstance(message, Mapping) else {"content": message} for message in (*call.messages, call.response)
    )
    return replace(call, messages=messages[:-1], response=messages[-1])


def _tokens(
    call: Call,
    spans: Sequence[LossSpan],
    entropies_S: FloatArray | None,
    ratios: TokenRatios | None,
    decode: Decode | None,
) -> list[TokenView]:
    numbers = _token_numbers(call, spans)
    views = []
    for start, end, text in pieces(call.sampled_ids_S, decode):
        advantage, weight = numbers.get(end - 1, (None, None))
        views.append(
            TokenView(
                text=clean_for_page(text),
                ids=tuple(call.sampled_ids_S[start:end].tolist()),
                logprobs=tuple(call.logprobs_S[start:end].tolist()),
                versions=tuple(call.versions_S[start:end].tolist()),
                entropies=() if entropies_S is None else _finite(entropies_S[start:end]),
                ratios=() if ratios is None else _finite(ratios.ratios_S[start:end]),
                clipped=ratios is not None and bool(ratios.clipped_S[start:end].any()),
                advantage=advantage,
                weight=weight,
            )
        )
    return views


def _finite(numbers_S: FloatArray) -> tuple[float, ...]:
    return tuple(numbers_S[np.isfinite(numbers_S)].tolist())


def _token_numbers(call: Call, spans: Sequence[LossSpan]) -> dict[int, tuple[float | None, float | None]]:
    """Return (advantage, weight) of each sampled token that carried loss, by its place among them. A span's places
    count from the beginning of its sequence, which is that of the call's prompt."""
    numbers: dict[int, tuple[float | None, float | None]] = {}
    for span in spans:
        places = span.places_S - len(call.prompt_ids_P)
        for place, advantage, weight in zip(places, span.advantages_S, span.weights_S, strict=True):
            if 0 <= place < len(call.sampled_ids_S):
                numbers[int(place)] = (finite(float(advantage)), finite(float(weight)))
    return numbers


def _decoded(ids: list[int], decode: Decode | None) -> str:
    if decode is None:
        return " ".join(f"<{number}>" for number in ids)
    return clean_for_page(decode(ids)) if ids else ""


def _kind(source: sqlite3.Connection, number: int) -> int:
    return int(source.execute("SELECT is_final FROM rollouts WHERE key = ?", (number // 2,)).fetchone()[0])


def _trains(kind: int, number: int) -> bool:
    """Whether a rollout of this kind may be trained: evaluations, repeated attempts and baselines are not, although an
    attempt has the id of the rollout that took its place."""
    return number % 2 == 0 and KINDS.get(kind) == "rollout"


def _steps(source: sqlite3.Connection, rollout: Rollout) -> list[tuple[int, str | None]]:
    """Return the steps that drew a rollout's group; of an older journal, the one that it was made for."""
    if steps := read_group_steps(source, rollout.group_id):
        return steps
    step = step_of_group(rollout.group_id)
    return [] if step is None else [(step, None)]


def _losses(source: sqlite3.Connection, rollout: Rollout, steps: Sequence[int]) -> dict[int, tuple[int, float]]:
    """Return (loss tokens, advantage) of each call in the last of these steps that it carried loss in."""
    sql = "SELECT call, SUM(num_tokens), MAX(advantage) FROM trained WHERE step = ? AND rollout_id = ? GROUP BY call"
    losses: dict[int, tuple[int, float]] = {}
    for step in steps:
        losses |= {call: (count, advantage) for call, count, advantage in source.execute(sql, (step, rollout.id))}
    return losses


def _call_views(rollout: Rollout, losses: Mapping[int, tuple[int, float]], *, trained: bool) -> tuple[CallView, ...]:
    found = origins(rollout.calls)
    return tuple(
        _call_view(rollout, call, origin, losses, trained=trained)
        for call, origin in zip(rollout.calls, found, strict=True)
    )


def _call_view(
    rollout: Rollout, call: Call, origin: Origin, losses: Mapping[int, tuple[int, float]], *, trained: bool
) -> CallView:
    count, advantage = losses.get(call.index, (0, None))
    names = tool_names(call.messages)
    versions = call.versions_S
    request = _request(call)
    return CallView(
        index=call.index,
        agent=clean_for_page(call.agent),
        model=clean_for_page(call.model),
        origin=origin,
        messages=tuple(message_view(message, names) for message in call.messages[origin.kept :]),
        response=message_view(call.response, names),
        status=call.status.value,
        finish_reason=str(call.finish_reason),
        temperature=call.sampling.temperature,
        prompt_tokens=len(call.prompt_ids_P),
        sampled_tokens=len(call.sampled_ids_S),
        versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
        mean_logprob=finite(float(call.logprobs_S.mean())) if len(call.logprobs_S) else None,
        seconds=call.seconds,
        reward=rollout.call_rewards.get(call.index),
        step_reward=rollout.step_rewards.get(call.index),
        state=clean_for_page(rollout.states.get(call.index, "")),
        trained_tokens=count,
        advantage=finite(advantage),
        no_loss="" if count else _why_no_loss(call, trained=trained),
        tools=tuple(_tool_name(tool) for tool in call.tools),
        constraint="" if call.constraint is None else clean_for_page(call.constraint.origin),
        trace="" if call.span is None else clean_for_page(call.span.trace_id),
        span="" if call.span is None else clean_for_page(call.span.span_id),
        request=clean_for_page(request),
        curl=_curl(request),
    )


def _why_no_loss(call: Call, *, trained: bool) -> str:
    if call.status != "used":
        return str(call.status.value)
    if call.sampling.temperature <= 0:
        return "temperature 0"
    return "its tokens got no weight" if trained else "its rollout was not trained"


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return clean_for_page(str((function if isinstance(function, Mapping) else tool).get("name", "?")))


def _request(call: Call) -> str:
    body: dict[str, Any] = {"messages": list(call.messages)}
    if call.tools:
        body["tools"] = list(call.tools)
    body |= {"temperature": call.sampling.temperature, "max_tokens": call.sampling.max_tokens}
    body |= call.sampling.cuts
    if call.sampling.stop:
        body["stop"] = list(call.sampling.stop)
    return json.dumps(body, indent=2)


def _curl(request: str) -> str:
    """Return a shell command that sends a request; JSON is written in ASCII, so that nothing in it is a control
    character."""
    body = json.dumps({"model": "default", **json.loads(request)})
    return (
        f"curl {LOCAL_SERVER} -H 'Content-Type: application/json' -H \"Authorization: Bearer $SHARPEN_API_KEY\" "
        f"-d {shlex.quote(body)}"
    )


def time_line(rollout: Rollout) -> TimeLine:
    """Place the calls of a rollout in time."""
    calls = [call for call in rollout.calls if call.started is not None or call.seconds > 0]
    recorded = all(call.started is not None for call in calls)
    starts = _recorded_starts(rollout, calls) if recorded else _starts_in_turn(calls)
    agents = tuple(dict.fromkeys(call.agent for call in calls))
    ends: list[float] = []  # of each lane
    spans, in_calls, reached = [], 0.0, 0.0
    for call, start in sorted(zip(calls, starts, strict=True), key=lambda pair: (pair[1], pair[0].index)):
        end = start + call.seconds
        lane = next((lane for lane, busy_until in enumerate(ends) if busy_until <= start), len(ends))
        ends[lane : lane + 1] = [end]
        in_calls += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        spans.append(
            Span(
                call=call.index,
                start=start,
                seconds=call.seconds,
                lane=lane,
                agent=agents.index(call.agent),
                delivered=call.delivered,
            )
        )
    return TimeLine(
        spans=tuple(spans),
        seconds=max(rollout.seconds, reached),
        lanes=len(ends),
        agents=tuple(map(clean_for_page, agents)),
        in_calls=in_calls,
        elsewhere=max(0.0, rollout.seconds - in_calls),
        recorded=recorded,
    )


def _recorded_starts(rollout: Rollout, calls: Sequence[Call]) -> list[float]:
    starts = [call.started for call in calls if call.started is not None]
    begin = min(starts if rollout.started is None else [rollout.started, *starts], default=0.0)
    return [start - begin for start in starts]


def _starts_in_turn(calls: Sequence[Call]) -> list[float]:
    return [sum(earlier.seconds for earlier in calls[:place]) for place in range(len(calls))]


def _mates(source: sqlite3.Connection, number: int) -> tuple[Mate, ...]:
    rows = source.execute(
        "SELECT key, idx, is_final, attempt, outcome, reward FROM rollouts"
        " WHERE group_key = (SELECT group_key FROM rollouts WHERE key = ?) ORDER BY key",
        (number // 2,),
    )
    return tuple(
        Mate(
            name=name_of(2 * key + number % 2),
            index=idx,
            kind=KINDS.get(kind, ""),
            attempt=attempt,
            outcome=outcome,
            reward=finite(reward),
        )
        for key, idx, kind, attempt, outcome, reward in rows
    )


def _neighbours(source: sqlite3.Connection, number: int) -> tuple[str | None, str | None]:
    key = number // 2
    found = source.execute(
        "SELECT (SELECT MAX(key) FROM rollouts WHERE key < :key), (SELECT MIN(key) FROM rollouts WHERE key > :key)",
        {"key": key},
    ).fetchone()
    previous, following = (None if other is None else name_of(2 * other + number % 2) for other in found)
    return previous, following


def _evaluated(rollout: Rollout) -> tuple[str, str]:
    """Return the moment and the place of an evaluated rollout."""
    moment, _, rest = rollout.group_id.partition("/")
    return clean_for_page(moment), clean_for_page(rest.removesuffix(f"/{rollout.task_id}"))


def _row_text(task: Task) -> str:
    return clean_for_page(json.dumps(task.row, indent=2, ensure_ascii=False))
