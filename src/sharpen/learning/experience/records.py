"""The tables of the journal, and the functions that write groups and steps into them.

In: records and an open connection. Out: rows with explicit columns; arrays are stored as raw little-endian bytes
(int32, float32), other values as JSON. `reading` turns rows back into the same records.

Size grows linearly with the turns of a rollout, because a call stores only its difference from an earlier call of its
rollout, its *base*: its parent or, for a call that starts a new sequence, the recent call with the longest common
prefix. `prompt_kept` counts the ids shared with the base's prompt and sampled ids, `messages_kept` the messages shared
with the base's messages and response. Tool schemas, constraints and task rows are stored once per distinct value
(`texts`). So are the experts of a prompt (`routes`), which the rollouts of a group share; a call stores only those
beyond the first `kept` tokens, which have the same experts in its base. Of the images in a prompt a call stores (hash,
start, length) beyond the first `kept` ones, which its base has too; their content is in files (`images`).

Shape suffixes: P prompt tokens of a call, N prompt and sampled tokens of a call, S loss tokens of a call, L layers with
experts, K experts of a token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sharpen.learning.experience.images import stand_in
from sharpen.types import Call, Check, Experience, FloatArray, Group, IntArray, PictureSpan, Rollout, RouteArray

SCHEMA_VERSION = 2

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS texts (id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL, version INTEGER NOT NULL,
    task_id TEXT NOT NULL, task_index INTEGER NOT NULL, task_row INTEGER NOT NULL REFERENCES texts (id)
);
CREATE INDEX IF NOT EXISTS groups_id ON groups (id);
CREATE TABLE IF NOT EXISTS side_groups (group_key INTEGER PRIMARY KEY REFERENCES groups (key), beside TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
    key INTEGER PRIMARY KEY, group_key INTEGER NOT NULL REFERENCES groups (key), is_final INTEGER NOT NULL,
    id TEXT NOT NULL, group_id TEXT NOT NULL, task_id TEXT NOT NULL, idx INTEGER NOT NULL, attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL, reward REAL, metrics TEXT NOT NULL, call_rewards TEXT NOT NULL, error TEXT,
    seconds REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS rollouts_group ON rollouts (group_key);
CREATE TABLE IF NOT EXISTS calls (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), idx INTEGER NOT NULL, parent INTEGER, base INTEGER, status
    TEXT NOT NULL, finish_reason TEXT NOT NULL, temperature REAL NOT NULL, top_p REAL NOT NULL, top_k INTEGER NOT
    NULL, max_tokens INTEGER NOT NULL, stop TEXT NOT NULL, prompt_kept INTEGER NOT NULL, prompt_suffix BLOB NOT NULL,
    sampled BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL, messages_kept INTEGER NOT NULL,
    messages_suffix TEXT NOT NULL, tools INTEGER NOT NULL REFERENCES texts (id), response TEXT NOT NULL, seconds REAL
    NOT NULL, PRIMARY KEY (rollout_key, idx)
);
CREATE TABLE IF NOT EXISTS call_notes (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL, step_reward REAL, state TEXT,
    request INTEGER,
    PRIMARY KEY (rollout_key, call)
);
CREATE TABLE IF NOT EXISTS call_constraints (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL,
    constraint_text INTEGER NOT NULL REFERENCES texts (id), PRIMARY KEY (rollout_key, call)
);
CREATE TABLE IF NOT EXISTS routes (
    id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, experts BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS call_routes (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL, num_layers INTEGER NOT NULL,
    top_k INTEGER NOT NULL, item_bytes INTEGER NOT NULL, kept INTEGER NOT NULL,
    prompt INTEGER NOT NULL REFERENCES routes (id), sampled BLOB NOT NULL, PRIMARY KEY (rollout_key, call)
);
CREATE TABLE IF NOT EXISTS call_pictures (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL, kept INTEGER NOT NULL,
    spans TEXT NOT NULL, PRIMARY KEY (rollout_key, call)
);
CREATE TABLE IF NOT EXISTS call_supports (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL, vocab_size INTEGER NOT NULL,
    sizes BLOB NOT NULL, packed BLOB NOT NULL, PRIMARY KEY (rollout_key, call)
);
CREATE TABLE IF NOT EXISTS call_names (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL, agent TEXT NOT NULL,
    model TEXT NOT NULL, PRIMARY KEY (rollout_key, call)
);
CREATE TABLE IF NOT EXISTS call_times (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL, started REAL NOT NULL,
    PRIMARY KEY (rollout_key, call)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS call_seeds (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL, PRIMARY KEY (rollout_key, call)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS call_min_p (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL, min_p REAL NOT NULL,
    PRIMARY KEY (rollout_key, call)
);
CREATE TABLE IF NOT EXISTS rollout_notes (
    rollout_key INTEGER PRIMARY KEY REFERENCES rollouts (key), started REAL, traceback TEXT
);
CREATE TABLE IF NOT EXISTS call_traces (
    rollout_key INTEGER NOT NULL REFERENCES rollouts (key), call INTEGER NOT NULL, trace_id TEXT NOT NULL,
    span_id TEXT NOT NULL, PRIMARY KEY (rollout_key, call)
);
CREATE TABLE IF NOT EXISTS steps (
    key INTEGER PRIMARY KEY, step INTEGER NOT NULL, version INTEGER NOT NULL, metrics TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS trained (
    step INTEGER NOT NULL, group_id TEXT NOT NULL, rollout_id TEXT NOT NULL, call INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, advantage REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS trained_step ON trained (step);
CREATE TABLE IF NOT EXISTS checks (
    step INTEGER NOT NULL, name TEXT NOT NULL, checked INTEGER NOT NULL, broken INTEGER NOT NULL, first TEXT
);
CREATE INDEX IF NOT EXISTS checks_step ON checks (step);
CREATE TABLE IF NOT EXISTS repeated (step INTEGER NOT NULL, session TEXT NOT NULL, found TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS gradients (step INTEGER NOT NULL, session TEXT NOT NULL, found TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS taught (
    step INTEGER NOT NULL, row_id TEXT NOT NULL, num_tokens INTEGER NOT NULL, too_long INTEGER NOT NULL,
    row_digest BLOB NOT NULL, ids_digest BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS taught_step ON taught (step);
CREATE TABLE IF NOT EXISTS spans (
    step INTEGER NOT NULL, update_number INTEGER NOT NULL, sequence INTEGER NOT NULL, group_id TEXT NOT NULL,
    rollout_id TEXT NOT NULL, call INTEGER NOT NULL, first INTEGER NOT NULL, num_tokens INTEGER NOT NULL, places BLOB,
    advantage REAL, advantages BLOB, weight REAL, weights BLOB, ids BLOB NOT NULL, records BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS spans_step ON spans (step);
CREATE TABLE IF NOT EXISTS entropies (
    step INTEGER NOT NULL, rollout_id TEXT NOT NULL, call INTEGER NOT NULL, first INTEGER NOT NULL, places BLOB,
    entropies BLOB NOT NULL, log_ratios BLOB, clipped BLOB
);
CREATE INDEX IF NOT EXISTS entropies_step ON entropies (step, rollout_id);
CREATE TABLE IF NOT EXISTS entropy_sums (
    step INTEGER NOT NULL, rollout_id TEXT NOT NULL, call INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    entropy REAL NOT NULL, varentropy REAL NOT NULL, cumulative REAL NOT NULL, PRIMARY KEY (step, rollout_id, call)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS step_groups (
    step INTEGER NOT NULL, update_number INTEGER NOT NULL, group_id TEXT NOT NULL, group_key INTEGER NOT NULL,
    left_out TEXT, replayed INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS step_groups_step ON step_groups (step);
CREATE TABLE IF NOT EXISTS sessions (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL, step INTEGER NOT NULL, version INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS step_sessions (step_key INTEGER PRIMARY KEY, session TEXT NOT NULL);
"""

BASELINE = 2
"""`is_final` of a group's greedy baseline; 1 is a rollout of the group, 0 an attempt that was repeated."""

EXPERT = "expert/"
"""Prefix of the ids of an expert's rows in records that also hold rollouts, whose group ids start with their step."""

EVALUATIONS = "evaluations.db"
"""A second journal next to `run.db`, with the same tables, for the rollouts of evaluations and of the check before
training, which are never trained. Group ids name the evaluation: `before/held-out/sampled/<task id>`."""

CHECK = "check"
"""What the group ids of the check's rollouts begin with: `check/<task id>`. They are no evaluation."""

INT_BYTES = np.dtype("<i4")
FLOAT_BYTES = np.dtype("<f4")

_MAX_CANDIDATES = 8
"""How many earlier calls are considered as the base of a call that starts a new sequence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaughtRow:
    """A row of a supervised step, or an expert's beside rollouts: its number of loss tokens (0 if it was left out, for
    example as `too_long`), and digests of its content in the dataset and of the sequences made from it."""

    row_id: str
    num_tokens: int
    too_long: bool
    row_digest: bytes
    ids_digest: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossSpan:
    """The loss tokens of one call in one sequence, as passed to the trainer: the number of the update in the step and
    of the sequence in the update (both from 0), and the tokens' positions (S), advantages and weights. `ids` is a
    digest of the sequence's ids up to the last of these tokens, and of the images there; `records` is one of their
    logprobs, versions and temperatures. `source` is the sequence itself; it is not stored."""

    update: int
    sequence: int
    group_id: str
    rollout_id: str
    call: int
    places_S: IntArray
    advantages_S: FloatArray
    weights_S: FloatArray
    ids: bytes
    records: bytes
    source: Experience | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A group of a step: the update it belongs to, why it was left out (None: it was not), and whether it is
    replayed."""

    group_id: str
    update: int
    left_out: str | None
    replayed: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The data passed to the trainer in a step."""

    spans: tuple[LossSpan, ...]
    places: tuple[GroupPlace, ...]


def insert_group(connection: sqlite3.Connection, group: Group) -> None:
    """Write a group with its rollouts, earlier attempts and calls."""
    task = group.task
    group_key = _insert(
        connection,
        "groups",
        id=group.id,
        version=group.version,
        task_id=task.id,
        task_index=task.index,
        task_row=_text_id(connection, row_text(task.row)),
    )
    if group.beside is not None:
        _insert(connection, "side_groups", group_key=group_key, beside=group.beside)
    baseline = () if group.baseline is None else (group.baseline,)
    for is_final, rollouts in ((1, group.rollouts), (0, group.attempts), (BASELINE, baseline)):
        for rollout in rollouts:
            _insert_rollout(connection, group_key, is_final, rollout)


def row_text(row: Mapping[str, Any]) -> str:
    """Return a task's row as the journal stores it."""
    return _to_json(row, fallback=stand_in)


def insert_step(
    connection: sqlite3.Connection,
    step: int,
    version: int,
    metrics: Mapping[str, float],
    experiences: Iterable[Experience],
    delivery: Delivery | None = None,
    session: str | None = None,
) -> None:
    """Write a trained step, and the number of tokens and the advantage of each call with loss in it. Those of an
    earlier step with the same number, which an interruption undid, are replaced; so is the `delivery`. `session` is the
    session that trained the step."""
    connection.execute("DELETE FROM trained WHERE step = ?", (step,))
    key = _insert(connection, "steps", step=step, version=version, metrics=_to_json(metrics))
    if session is not None:
        _insert(connection, "step_sessions", step_key=key, session=session)
    _insert_delivery(connection, step, delivery)
    for experience in experiences:
        mask_T = experience.loss_mask_T
        calls, firsts, counts = np.unique(experience.calls_T[mask_T], return_index=True, return_counts=True)
        advantages = experience.advantages_T[mask_T][firsts]
        connection.executemany(
            "INSERT INTO trained (step, group_id, rollout_id, call, num_tokens, advantage) VALUES (?, ?, ?, ?, ?, ?)",
            [
                (step, experience.group_id, experience.rollout_id, *values)
                for values in zip(calls.tolist(), counts.tolist(), advantages.tolist(), strict=True)
            ],
        )


def insert_session(connection: sqlite3.Connection, session: str, step: int, version: int) -> None:
    """Write that a session starts after this step, with weights of this policy version."""
    _insert(connection, "sessions", id=session, step=step, version=version)


def _insert_delivery(connection: sqlite3.Connection, step: int, delivery: Delivery | None) -> None:
    for table in ("spans", "step_groups"):
        connection.execute(f"DELETE FROM {table} WHERE step = ?", (step,))
    if delivery is None:
        return
    for span in delivery.spans:
        first, count = int(span.places_S[0]), len(span.places_S)
        contiguous = bool((np.diff(span.places_S) == 1).all())
        advantage, weight = _constant(span.advantages_S), _constant(span.weights_S)
        _insert(
            connection,
            "spans",
            step=step,
            update_number=span.update,
            sequence=span.sequence,
            group_id=span.group_id,
            rollout_id=span.rollout_id,
            call=span.call,
            first=first,
            num_tokens=count,
            places=None if contiguous else _to_bytes(span.places_S, INT_BYTES),
            advantage=advantage,
            advantages=None if advantage is not None else _to_bytes(span.advantages_S, FLOAT_BYTES),
            weight=weight,
            weights=None if weight is not None else _to_bytes(span.weights_S, FLOAT_BYTES),
            ids=span.ids,
            records=span.records,
        )
    connection.executemany(
        "INSERT INTO step_groups SELECT ?, ?, ?, COALESCE(MAX(key), 0), ?, ? FROM groups WHERE id = ?",
        [(step, one.update, one.group_id, one.left_out, one.replayed, one.group_id) for one in delivery.places],
    )


def _constant(numbers_S: FloatArray) -> float | None:
    """Return the value that all numbers equal; None if they differ or are not finite (SQLite stores NaN as NULL)."""
    same = np.isfinite(numbers_S[0]) and (numbers_S == numbers_S[0]).all()
    return float(numbers_S[0]) if same else None


def insert_taught(connection: sqlite3.Connection, step: int, rows: Iterable[TaughtRow]) -> None:
    """Write the rows of a supervised step, replacing those of an earlier step with the same number, which an
    interruption undid."""
    connection.execute("DELETE FROM taught WHERE step = ?", (step,))
    for row in rows:
        _insert(connection, "taught", step=step, **dataclasses.asdict(row))


def insert_checks(connection: sqlite3.Connection, step: int, checks: Iterable[Check]) -> None:
    """Write the checks of a step's certificate."""
    for check in checks:
        _insert(connection, "checks", step=step, **dataclasses.asdict(check))


def insert_repeated(connection: sqlite3.Connection, step: int, session: str, found: Mapping[str, Any]) -> None:
    """Write what was found when the updates of a step of this session were made once more."""
    _insert(connection, "repeated", step=step, session=session, found=_to_json(found))


def insert_gradients(connection: sqlite3.Connection, step: int, session: str, found: Mapping[str, Any]) -> None:
    """Write what was found when the trainer's gradients were compared before this session, which continues after a
    step."""
    _insert(connection, "gradients", step=step, session=session, found=_to_json(found))


def insert_parity(connection: sqlite3.Connection, measured: Mapping[str, Any]) -> None:
    """Write the measured rounding."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('parity', ?)", (_to_json(measured),))


def _insert_rollout(connection: sqlite3.Connection, group_key: int, is_final: int, rollout: Rollout) -> None:
    rollout_key = _insert(
        connection,
        "rollouts",
        group_key=group_key,
        is_final=is_final,
        id=rollout.id,
        group_id=rollout.group_id,
        task_id=rollout.task_id,
        idx=rollout.index,
        attempt=rollout.attempt,
        outcome=rollout.outcome.value,
        reward=rollout.reward,
        metrics=_to_json(rollout.metrics),
        call_rewards=_to_json({str(index): reward for index, reward in rollout.call_rewards.items()}),
        error=_valid(rollout.error),
        seconds=rollout.seconds,
    )
    if rollout.started is not None or rollout.traceback is not None:
        traceback = _valid(rollout.traceback)
        _insert(connection, "rollout_notes", rollout_key=rollout_key, started=rollout.started, traceback=traceback)
    requests = {call.index: call.request for call in rollout.calls if call.request is not None}
    for index in sorted({*rollout.step_rewards, *rollout.states, *requests}):
        insert_note(
            connection,
            rollout_key,
            index,
            step_reward=rollout.step_rewards.get(index),
            state=rollout.states.get(index),
            request=requests.get(index),
        )
    histories: list[IntArray] = []
    for position, call in enumerate(rollout.calls):
        insert_call(connection, rollout_key, rollout.calls[:position], histories, call)
        histories.append(np.concatenate([call.prompt_ids_P, call.sampled_ids_S]))


def _valid(text: str | None) -> str | None:
    """Return a text that may quote what is not valid Unicode, which SQLite rejects, with that escaped."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def insert_note(connection: sqlite3.Connection, rollout_key: int, call: int, **note: Any) -> None:
    """Write what is known of a call beside itself: its `step_reward`, its `state`, the first choice of its
    `request`."""
    _insert(connection, "call_notes", rollout_key=rollout_key, call=call, **note)


def insert_call(
    connection: sqlite3.Connection, rollout_key: int, earlier: Sequence[Call], histories: Sequence[IntArray], call: Call
) -> None:
    """Write a call of a rollout whose `earlier` calls are written; `histories` are their prompt and sampled ids."""
    base, prompt_kept = _find_base(call, histories)
    known = () if base is None else (*earlier[base].messages, earlier[base].response)
    messages_kept = _num_common(known, call.messages)
    _insert(
        connection,
        "calls",
        rollout_key=rollout_key,
        idx=call.index,
        parent=call.parent,
        base=base,
        status=call.status.value,
        finish_reason=call.finish_reason,
        temperature=call.sampling.temperature,
        top_p=call.sampling.top_p,
        top_k=call.sampling.top_k,
        max_tokens=call.sampling.max_tokens,
        stop=_to_json(call.sampling.stop),
        prompt_kept=prompt_kept,
        prompt_suffix=_to_bytes(call.prompt_ids_P[prompt_kept:], INT_BYTES),
        sampled=_to_bytes(call.sampled_ids_S, INT_BYTES),
        logprobs=_to_bytes(call.logprobs_S, FLOAT_BYTES),
        versions=_to_bytes(call.versions_S, INT_BYTES),
        messages_kept=messages_kept,
        messages_suffix=_to_json(call.messages[messages_kept:]),
        tools=_text_id(connection, _to_json(call.tools)),
        response=_to_json(call.response),
        seconds=call.seconds,
    )
    if call.routes_NLK is not None:
        _insert_routes(connection, rollout_key, call, None if base is None else earlier[base].routes_NLK)
    if call.pictures:
        _insert_pictures(connection, rollout_key, call, () if base is None else earlier[base].pictures)
    if call.agent or call.model:
        names = {"agent": call.agent, "model": call.model}
        _insert(connection, "call_names", rollout_key=rollout_key, call=call.index, **names)
    if call.started is not None:
        _insert(connection, "call_times", rollout_key=rollout_key, call=call.index, started=call.started)
    if call.sampling.min_p:
        _insert(connection, "call_min_p", rollout_key=rollout_key, call=call.index, min_p=call.sampling.min_p)
    if call.seeded:
        _insert(connection, "call_seeds", rollout_key=rollout_key, call=call.index)
    if call.supports is not None:
        of_tokens = {"vocab_size": call.supports.vocab_size, "packed": call.supports.packed}
        sizes = _to_bytes(call.supports.sizes_S, INT_BYTES)
        _insert(connection, "call_supports", rollout_key=rollout_key, call=call.index, sizes=sizes, **of_tokens)
    if call.span is not None:
        _insert(connection, "call_traces", rollout_key=rollout_key, call=call.index, **dataclasses.asdict(call.span))
    if call.constraint is not None:
        text = _to_json(dataclasses.asdict(call.constraint))
        _insert(
            connection,
            "call_constraints",
            rollout_key=rollout_key,
            call=call.index,
            constraint_text=_text_id(connection, text),
        )


def _insert_routes(connection: sqlite3.Connection, rollout_key: int, call: Call, known_NLK: RouteArray | None) -> None:
    """Write the experts of a call's tokens; `known_NLK` are those of its base."""
    routes_NLK = call.routes_NLK
    assert routes_NLK is not None
    kept = 0 if known_NLK is None else _num_common_routes(known_NLK, routes_NLK)
    num_prompt = max(kept, len(call.prompt_ids_P))
    experts = _route_bytes(routes_NLK[kept:num_prompt])
    digest = hashlib.blake2b(experts, digest_size=16).digest()
    connection.execute("INSERT OR IGNORE INTO routes (hash, experts) VALUES (?, ?)", (digest, experts))
    _insert(
        connection,
        "call_routes",
        rollout_key=rollout_key,
        call=call.index,
        num_layers=routes_NLK.shape[1],
        top_k=routes_NLK.shape[2],
        item_bytes=routes_NLK.itemsize,
        kept=kept,
        prompt=int(connection.execute("SELECT id FROM routes WHERE hash = ?", (digest,)).fetchone()[0]),
        sampled=_route_bytes(routes_NLK[num_prompt:]),
    )


def _insert_pictures(
    connection: sqlite3.Connection, rollout_key: int, call: Call, known: Sequence[PictureSpan]
) -> None:
    """Write where the images of a call's prompt are; `known` are those of its base."""
    kept = _num_common(known, call.pictures)
    spans = [(span.picture.sha256, span.start, span.length) for span in call.pictures[kept:]]
    _insert(
        connection,
        "call_pictures",
        rollout_key=rollout_key,
        call=call.index,
        kept=kept,
        spans=_to_json(spans),
    )


def _num_common_routes(first_NLK: RouteArray, second_NLK: RouteArray) -> int:
    """Return how many tokens at the start have the same experts."""
    if first_NLK.shape[1:] != second_NLK.shape[1:] or first_NLK.dtype != second_NLK.dtype:
        return 0
    length = min(len(first_NLK), len(second_NLK))
    differs_N = (first_NLK[:length] != second_NLK[:length]).any(axis=(1, 2))
    return int(np.argmax(differs_N)) if differs_N.any() else length


def _route_bytes(routes_NLK: RouteArray) -> bytes:
    return routes_NLK.astype(f"<u{routes_NLK.itemsize}", copy=False).tobytes()


def _insert(connection: sqlite3.Connection, table: str, **values: Any) -> int:
    """Insert one row and return its key."""
    names = ", ".join(values)
    places = ", ".join(f":{name}" for name in values)
    cursor = connection.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", values)
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _find_base(call: Call, histories: Sequence[IntArray]) -> tuple[int | None, int]:
    """Return the base of a call, if any, and the number of prompt ids that they share."""
    if call.parent is not None:
        candidates: Iterable[int] = (call.parent,)
    else:
        candidates = range(max(0, len(histories) - _MAX_CANDIDATES), len(histories))
    base, max_kept = None, 0
    for candidate in candidates:
        kept = _num_common_ids(histories[candidate], call.prompt_ids_P)
        if kept > max_kept:
            base, max_kept = candidate, kept
    return base, max_kept


def _num_common_ids(history_N: IntArray, prompt_ids_P: IntArray) -> int:
    length = min(len(history_N), len(prompt_ids_P))
    differs = history_N[:length] != prompt_ids_P[:length]
    return int(np.argmax(differs)) if differs.any() else length


def _num_common(known: Sequence[Any], messages: Sequence[Any]) -> int:
    count = 0
    for ours, theirs in zip(known, messages, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def _text_id(connection: sqlite3.Connection, text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    connection.execute("INSERT OR IGNORE INTO texts (hash, json) VALUES (?, ?)", (digest, text))
    return int(connection.execute("SELECT id FROM texts WHERE hash = ?", (digest,)).fetchone()[0])


def _to_bytes(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _to_json(value: Any, *, fallback: Any = None) -> str:
    """Return ASCII JSON; numpy numbers become plain ones. `fallback` converts other values that JSON cannot hold to
    text; without it, they raise `TypeError`."""

    def plain(item: Any) -> Any:
        if isinstance(item, Mapping):
            return dict(item)
        if isinstance(item, np.generic | np.ndarray):
            return item.tolist()
        if fallback is not None:
            return fallback(item)
        raise TypeError(f"{type(item).__name__} cannot be written as JSON: {item!r}")

    return json.dumps(value, default=plain, separators=(",", ":"))
