"""Reads a journal (`run.db`), also while a run is writing it.

In: its path. Out: records equal to those that were added, except that tuples become lists, values of a task's row that
JSON cannot hold become text, and rollouts whose text was dropped (`journal`) are marked as `trimmed`.

Shape suffixes: P prompt tokens, S sampled tokens of a call.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.learning.experience.expansion import CALL_SIZES, ROUTE_SIZES, prompt_bytes, refuse_more_than_memory
from sharpen.learning.experience.images import ImageFolder, read_image
from sharpen.learning.experience.opening import has, reading
from sharpen.learning.experience.records import (
    BASELINE,
    FLOAT_BYTES,
    INT_BYTES,
    TaughtRow,
)
from sharpen.types import (
    Call,
    CallStatus,
    Check,
    Constraint,
    FloatArray,
    Group,
    IntArray,
    Outcome,
    Picture,
    PictureSpan,
    Rollout,
    RouteArray,
    Sampling,
    Span,
    Supports,
    Task,
    step_of_group,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A trained step: the policy version after it, its metrics, and the session that trained it (None if not
    recorded)."""

    step: int
    version: int
    metrics: Mapping[str, float]
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCall:
    """A call that carried loss in a step, with its number of loss tokens and its advantage."""

    step: int
    group_id: str
    rollout_id: str
    call: int
    num_tokens: int
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEntry:
    """A summary of a rollout's last attempt, without its calls."""

    id: str
    group_id: str
    outcome: Outcome
    reward: float | None
    num_calls: int


def read_parity(path: Path | str) -> Mapping[str, Any] | None:
    """Return the measured rounding (`trainer.rounding.Rounding`); None if the run computed in float32, or an older
    version wrote the journal."""
    with reading(path) as connection:
        row = connection.execute("SELECT value FROM meta WHERE key = 'parity'").fetchone()
    return None if row is None else json.loads(row[0])


def find_rollouts(path: Path | str, *, part: str = "", last: int | None = None) -> list[RolloutEntry]:
    """Return the rollouts whose id contains `part`, in the order they were added; with `last`, only those of the last
    `last` groups."""
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT id, group_id, outcome, reward, (SELECT COUNT(*) FROM calls WHERE rollout_key = rollouts.key)"
            " AS num_calls FROM rollouts WHERE is_final AND instr(id, :part) AND group_key IN"
            " (SELECT key FROM groups ORDER BY key DESC LIMIT :last) ORDER BY key",
            {"part": part, "last": -1 if last is None else last},
        ).fetchall()
        return [
            RolloutEntry(**dict(row) | {"outcome": Outcome(row["outcome"]), "reward": _number(row["reward"])})
            for row in rows
        ]


def read_group_ids(path: Path | str) -> list[tuple[int, str]]:
    """Return (key in the journal, id) of all groups, in the order they were added."""
    return [(key, id_) for key, id_, _ in _groups(path)]


def read_groups_at(path: Path | str, keys: Iterable[int], *, most_bytes: float | None = None) -> list[Group]:
    """Return the groups with these keys in the journal. Raises `JournalError` if their prompts need more memory than
    `most_bytes`: by default that of this machine. `math.inf` is for what this run itself has written."""
    with reading(path) as connection:
        keys = list(keys)
        _refuse_too_large(connection, keys, most_bytes)
        return [_read_group(connection, key) for key in keys]


def read_groups(path: Path | str, *, group_id: str | None = None, last: int | None = None) -> Iterator[Group]:
    """Yield groups in the order they were added: all, those with `group_id`, or only the last `last` groups."""
    with reading(path) as connection:
        keys = [
            key
            for (key,) in connection.execute(
                "SELECT key FROM groups WHERE :id IS NULL OR id = :id ORDER BY key DESC LIMIT :last",
                {"id": group_id, "last": -1 if last is None else last},
            )
        ]
        for key in reversed(keys):
            _refuse_too_large(connection, [key])
            yield _read_group(connection, key)


def read_rollout_from(connection: sqlite3.Connection, key: int) -> tuple[Rollout, Task, int] | None:
    """Return the rollout with this key of an open journal, its task and the policy version that its group started at;
    None if there is none. What stands where a message should be is returned as it is."""
    row = connection.execute("SELECT * FROM rollouts WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    group = connection.execute(
        "SELECT groups.*, texts.json AS row FROM groups JOIN texts ON texts.id = groups.task_row WHERE key = ?",
        (row["group_key"],),
    ).fetchone()
    task = Task(id=group["task_id"], index=group["task_index"], row=_object(group["row"]))
    refuse_more_than_memory(_prompt_bytes(connection, key), f"the calls of the rollout {row['id']!r}")
    return _read_rollout(connection, row, lenient=True), task, group["version"]


def read_groups_from(connection: sqlite3.Connection) -> Iterator[Group]:
    """All groups of an open database with the journal's tables (rows are `sqlite3.Row`), in the order they were added,
    whatever memory they need."""
    for (key,) in connection.execute("SELECT key FROM groups ORDER BY key").fetchall():
        yield _read_group(connection, key)


def read_last_groups(path: Path | str) -> dict[int, list[int]]:
    """Return the keys of each step's groups. If a step was repeated after an interruption, they are those of its last
    time.

    A repeated step is recognized by a group id that the step already has, since it draws the same tasks first, by
    groups of another step in between, or by ids of another form: an earlier version began it.
    """
    return _last_groups(read_group_ids(path))


def read_trained_groups(path: Path | str, *, last_step: int, oldest: int) -> list[tuple[Group, list[TrainedCall]]]:
    """Return the groups of the steps up to `last_step` that started at policy version `oldest` or later, in the order
    they were added, each with its calls that carried loss in these steps."""
    groups = _groups(path)
    ids = {key: group_id for key, group_id, version in groups if version >= oldest}
    steps = _last_groups((key, group_id) for key, group_id, _ in groups)
    keys = [key for step, step_keys in steps.items() if step <= last_step for key in step_keys if key in ids]
    if not keys:
        return []
    calls: dict[str, list[TrainedCall]] = {ids[key]: [] for key in keys}
    first = min(step for step, step_keys in steps.items() if any(key in ids for key in step_keys))
    for call in _read_trained(path, first, last_step):
        if call.group_id in calls:
            calls[call.group_id].append(call)
    return [(group, calls[group.id]) for group in read_groups_at(path, sorted(keys), most_bytes=math.inf)]


def read_steps(path: Path | str) -> list[StepRecord]:
    """Return the trained steps, in the order they were added."""
    with reading(path) as connection:
        session = "NULL"
        if has(connection, "step_sessions"):
            session = "(SELECT session FROM step_sessions WHERE step_key = key)"
        rows = connection.execute(
            f"SELECT step, version, metrics, {session} AS session FROM steps ORDER BY key"
        ).fetchall()
        return [StepRecord(**dict(row) | {"metrics": json.loads(row["metrics"])}) for row in rows]


def read_trained(path: Path | str, *, step: int | None = None) -> list[TrainedCall]:
    """Return the calls that carried loss, of one step or all, in the order they were added."""
    return _read_trained(path, step, step)


def read_checks(path: Path | str) -> dict[int, tuple[Check, ...]]:
    """Return the checks of each step's certificate. If a step was repeated, they are those of its last time."""
    with reading(path) as connection:
        rows = connection.execute("SELECT step, name, checked, broken, first FROM checks ORDER BY rowid").fetchall()
    by_step: dict[int, dict[str, Check]] = {}
    for row in rows:
        fields = {name: row[name] for name in ("name", "checked", "broken", "first")}
        by_step.setdefault(row["step"], {})[row["name"]] = Check(**fields)
    return {step: tuple(checks.values()) for step, checks in by_step.items()}


def read_taught(path: Path | str) -> dict[int, list[TaughtRow]]:
    """Return the rows of each step of a supervised run; empty if the run did not record them."""
    with reading(path) as connection:
        if not has(connection, "taught"):
            return {}
        rows = connection.execute("SELECT * FROM taught ORDER BY rowid").fetchall()
    taught: dict[int, list[TaughtRow]] = {}
    for row in rows:
        fields = {name: row[name] for name in ("row_id", "num_tokens", "row_digest", "ids_digest")}
        taught.setdefault(row["step"], []).append(TaughtRow(too_long=bool(row["too_long"]), **fields))
    return taught


def read_task_rows(path: Path | str) -> dict[str, str]:
    """Return the row of each task that was rolled out, as written by `records.row_text`, by task id."""
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT DISTINCT task_id, texts.json FROM groups JOIN texts ON texts.id = groups.task_row"
        )
        return dict(rows.fetchall())


def count_taught(path: Path | str, steps: Collection[int] | None = None) -> dict[str, int]:
    """Count the rows of a supervised run that were trained, too long or empty, in these steps or all (but not step 0,
    which records the held-out rows)."""
    taught = read_taught(path).items()
    rows = [row for step, step_rows in taught if step and (steps is None or step in steps) for row in step_rows]
    counts = {
        "trained": sum(row.num_tokens > 0 for row in rows),
        "too long": sum(row.too_long for row in rows),
        "empty": sum(row.num_tokens == 0 and not row.too_long for row in rows),
    }
    return {name: count for name, count in counts.items() if count}


def count_outcomes(path: Path | str, groups: Collection[int] | None = None) -> dict[str, int]:
    """Count rollouts by outcome, including repeated attempts, in all groups or in those with these keys."""
    return _count_by_group(path, "outcome", "rollouts", groups)


def count_calls(path: Path | str, groups: Collection[int] | None = None) -> dict[str, int]:
    """Count calls by status, in all groups or in those with these keys."""
    return _count_by_group(path, "status", "calls JOIN rollouts ON rollouts.key = rollout_key", groups)


def _groups(path: Path | str) -> list[tuple[int, str, int]]:
    """Return (key in the journal, id, policy version) of all groups, in the order they were added."""
    with reading(path) as connection:
        return [tuple(row) for row in connection.execute("SELECT key, id, version FROM groups ORDER BY key")]


def _last_groups(groups: Iterable[tuple[int, str]]) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    seen: set[str] = set()
    current = ""
    for key, group_id in groups:
        step, name = step_of_group(group_id), group_id.partition("/")[0]
        if step is None:
            continue
        if name != current or group_id in seen:
            steps[step], seen = [], set()
        steps[step].append(key)
        seen.add(group_id)
        current = name
    return dict(sorted(steps.items()))


def _read_trained(path: Path | str, first: int | None, last: int | None) -> list[TrainedCall]:
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT step, group_id, rollout_id, call, num_tokens, advantage FROM trained"
            " WHERE (:first IS NULL OR step >= :first) AND (:last IS NULL OR step <= :last) ORDER BY rowid",
            {"first": first, "last": last},
        ).fetchall()
    return [TrainedCall(**dict(row)) for row in rows]


def _count_by_group(path: Path | str, column: str, table: str, groups: Collection[int] | None) -> dict[str, int]:
    """Count the values of a column, most common first, in all groups or in those with these keys."""
    keys = None if groups is None else set(groups)
    counts: Counter[str] = Counter()
    with reading(path) as connection:
        for value, key, count in connection.execute(
            f"SELECT {column}, group_key, COUNT(*) FROM {table} GROUP BY {column}, group_key"
        ):
            counts[value] += count if keys is None or key in keys else 0
    return {value: count for value, count in counts.most_common() if count}


def _refuse_too_large(connection: sqlite3.Connection, keys: Iterable[int], most_bytes: float | None = None) -> None:
    """Raise `JournalError` if the prompts of these groups need more memory than there is."""
    if most_bytes == math.inf:
        return
    sql = "SELECT key FROM rollouts WHERE group_key = ?"
    rollouts = [rollout for key in keys for (rollout,) in connection.execute(sql, (key,)).fetchall()]
    num_bytes = sum(_prompt_bytes(connection, rollout) for rollout in rollouts)
    refuse_more_than_memory(num_bytes, f"the calls of {len(rollouts)} rollouts", most_bytes)


def _prompt_bytes(connection: sqlite3.Connection, rollout_key: int) -> int:
    routes = connection.execute(ROUTE_SIZES, (rollout_key,)) if has(connection, "call_routes") else ()
    return prompt_bytes(
        connection.execute(CALL_SIZES, (rollout_key,)),
        {row["call"]: row for row in routes},
        {call: (kept, len(own)) for call, (kept, own) in _picture_rows(connection, rollout_key).items()},
    )


def _read_group(connection: sqlite3.Connection, key: int) -> Group:
    group = connection.execute(
        "SELECT groups.*, texts.json AS row FROM groups JOIN texts ON texts.id = groups.task_row WHERE key = ?", (key,)
    ).fetchone()
    rows = connection.execute("SELECT * FROM rollouts WHERE group_key = ? ORDER BY key", (key,)).fetchall()
    rollouts = [(row["is_final"], _read_rollout(connection, row)) for row in rows]
    return Group(
        id=group["id"],
        version=group["version"],
        task=Task(id=group["task_id"], index=group["task_index"], row=_object(group["row"])),
        rollouts=tuple(rollout for is_final, rollout in rollouts if is_final == 1),
        baseline=next((rollout for is_final, rollout in rollouts if is_final == BASELINE), None),
        attempts=tuple(rollout for is_final, rollout in rollouts if not is_final),
        beside=_read_beside(connection, key),
    )


def _read_beside(connection: sqlite3.Connection, key: int) -> str | None:
    """Return the id of the group that this one is at the side of, if any; older journals have no such groups."""
    if not has(connection, "side_groups"):
        return None
    row = connection.execute("SELECT beside FROM side_groups WHERE group_key = ?", (key,)).fetchone()
    return None if row is None else str(row["beside"])


def _read_rollout(connection: sqlite3.Connection, row: sqlite3.Row, *, lenient: bool = False) -> Rollout:
    calls: list[Call] = []
    notes = _read_notes(connection, row["key"])
    requests = {note["call"]: note["request"] for note in notes}
    constraints = _read_constraints(connection, row["key"])
    names = read_call_names(connection, row["key"])
    routes = _route_rows(connection, row["key"])
    times, seeded = (_of_calls(connection, *of, row["key"]) for of in (("call_times", "started"), ("call_seeds", "1")))
    rollout_started, traceback = _read_rollout_note(connection, row["key"])
    spans, supports = _read_traces(connection, row["key"]), _read_supports(connection, row["key"])
    shown, min_p = _picture_rows(connection, row["key"]), _of_calls(connection, "call_min_p", "min_p", row["key"])
    files = _pictures_in(connection) if shown else None
    for call_row in connection.execute(
        "SELECT calls.*, texts.json AS tools_json FROM calls JOIN texts ON texts.id = calls.tools"
        " WHERE rollout_key = ? ORDER BY idx",
        (row["key"],),
    ):
        index = call_row["idx"]
        if index != len(calls):
            raise ValueError(f"call {len(calls)} of the rollout {row['id']!r} is missing")
        call = _read_call(calls, call_row, requests.get(index), constraints.get(index), lenient=lenient)
        agent, model = names.get(index, ("", ""))
        base = None if call_row["base"] is None else calls[call_row["base"]]
        routes_NLK = _read_routes(routes[index], base) if index in routes else None
        started, span = times.get(index), spans.get(index)
        pictures = _read_pictures(*shown[index], base, files) if index in shown else ()
        call = replace(
            call,
            agent=agent,
            model=model,
            started=started,
            span=span,
            routes_NLK=routes_NLK,
            seeded=index in seeded,
            supports=supports.get(index),
            sampling=replace(call.sampling, min_p=min_p.get(index, 0.0)),
        )
        calls.append(replace(call, pictures=pictures) if pictures else call)
    return Rollout(
        id=row["id"],
        group_id=row["group_id"],
        task_id=row["task_id"],
        index=row["idx"],
        attempt=row["attempt"],
        calls=tuple(calls),
        outcome=Outcome(row["outcome"]),
        reward=_number(row["reward"]),
        metrics={name: _number(value) for name, value in json.loads(row["metrics"]).items()},
        call_rewards={int(index): reward for index, reward in json.loads(row["call_rewards"]).items()},
        step_rewards={note["call"]: note["step_reward"] for note in notes if note["step_reward"] is not None},
        states={note["call"]: note["state"] for note in notes if note["state"] is not None},
        error=row["error"],
        traceback=traceback,
        seconds=row["seconds"],
        started=rollout_started,
        trimmed=_is_trimmed(connection, row["group_key"]),
    )


def _is_trimmed(connection: sqlite3.Connection, group_key: int) -> bool:
    """Whether the text of a group's rollouts was dropped; never in a journal without this table."""
    if not has(connection, "trimmed"):
        return False
    return connection.execute("SELECT 1 FROM trimmed WHERE group_key = ?", (group_key,)).fetchone() is not None


def _number(value: Any) -> Any:
    """Return a number, or None for none. Raises `TypeError` for another value: no run has written it."""
    if value is None or isinstance(value, int | float):
        return value
    raise TypeError(f"{value!r:.80} is no number")


def _object(text: str) -> Mapping[str, Any]:
    """Return a JSON object. Raises `TypeError` for other JSON: no run has written it."""
    return _as_object(json.loads(text))


def _objects(text: str) -> list[Mapping[str, Any]]:
    """Return a JSON array of objects. Raises as `_object`."""
    found = json.loads(text)
    if not isinstance(found, list):
        raise TypeError(f"{found!r:.80} is no list")
    return [_as_object(one) for one in found]


def _as_object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80} is no object")
    return value


def _read_notes(connection: sqlite3.Connection, rollout_key: int) -> list[sqlite3.Row]:
    """Return the notes on single calls (step reward, state, request); none in a journal without this table."""
    if not has(connection, "call_notes"):
        return []
    return connection.execute("SELECT * FROM call_notes WHERE rollout_key = ?", (rollout_key,)).fetchall()


def read_call_names(connection: sqlite3.Connection, rollout_key: int) -> dict[int, tuple[str, str]]:
    """Return the names of agent and model of a rollout's calls by index; none in a journal without this table."""
    if not has(connection, "call_names"):
        return {}
    rows = connection.execute("SELECT call, agent, model FROM call_names WHERE rollout_key = ?", (rollout_key,))
    return {call: (agent, model) for call, agent, model in rows}


def _of_calls(connection: sqlite3.Connection, table: str, column: str, rollout_key: int) -> dict[int, Any]:
    """Return what a table says of a rollout's calls, by index; none in a journal without it."""
    if not has(connection, table):
        return {}
    return dict(connection.execute(f"SELECT call, {column} FROM {table} WHERE rollout_key = ?", (rollout_key,)))


def _read_rollout_note(connection: sqlite3.Connection, rollout_key: int) -> tuple[float | None, str | None]:
    """Return when a rollout began and the traceback of its failure, if they are known."""
    if not has(connection, "rollout_notes"):
        return None, None
    sql = "SELECT started, traceback FROM rollout_notes WHERE rollout_key = ?"
    row = connection.execute(sql, (rollout_key,)).fetchone()
    return (None, None) if row is None else (row["started"], row["traceback"])


def _read_traces(connection: sqlite3.Connection, rollout_key: int) -> dict[int, Span]:
    """Return the spans of a rollout's calls by index; none in a journal without this table."""
    if not has(connection, "call_traces"):
        return {}
    rows = connection.execute("SELECT call, trace_id, span_id FROM call_traces WHERE rollout_key = ?", (rollout_key,))
    return {call: Span(trace_id=trace_id, span_id=span_id) for call, trace_id, span_id in rows}


def _read_constraints(connection: sqlite3.Connection, rollout_key: int) -> dict[int, Constraint]:
    """Return the constraints of a rollout's calls by index; none in a journal without this table."""
    if not has(connection, "call_constraints"):
        return {}
    rows = connection.execute(
        "SELECT call, json FROM call_constraints JOIN texts ON texts.id = constraint_text WHERE rollout_key = ?",
        (rollout_key,),
    )
    return {call: Constraint(**json.loads(text)) for call, text in rows}


def _read_supports(connection: sqlite3.Connection, rollout_key: int) -> dict[int, Supports]:
    """Return the supports of a rollout's truncated calls by index; none in a journal without this table."""
    if not has(connection, "call_supports"):
        return {}
    rows = connection.execute(
        "SELECT call, vocab_size, sizes, packed FROM call_supports WHERE rollout_key = ?", (rollout_key,)
    )
    return {
        call: Supports(vocab_size=vocab_size, sizes_S=np.frombuffer(sizes, INT_BYTES), packed=packed)
        for call, vocab_size, sizes, packed in rows
    }


def _route_rows(connection: sqlite3.Connection, rollout_key: int) -> dict[int, sqlite3.Row]:
    """Return the rows with the experts of a rollout's calls by index; none in a journal without this table."""
    if not has(connection, "call_routes"):
        return {}
    rows = connection.execute(
        "SELECT call_routes.*, routes.experts FROM call_routes JOIN routes ON routes.id = prompt WHERE rollout_key = ?",
        (rollout_key,),
    )
    return {row["call"]: row for row in rows}


def _read_routes(row: sqlite3.Row, base: Call | None) -> RouteArray:
    own = np.frombuffer(row["experts"] + row["sampled"], dtype=f"<u{row['item_bytes']}")
    own_NLK: RouteArray = own.reshape(-1, row["num_layers"], row["top_k"])
    if not row["kept"]:
        return own_NLK
    assert base is not None
    assert base.routes_NLK is not None
    joined: RouteArray = np.concatenate([base.routes_NLK[: row["kept"]], own_NLK])
    return joined


def _picture_rows(connection: sqlite3.Connection, rollout_key: int) -> dict[int, tuple[int, list[Any]]]:
    """Return, by index of the call, how many images its base has too, and (hash, start, length) of the others; none in
    a journal without this table."""
    if not has(connection, "call_pictures"):
        return {}
    rows = connection.execute("SELECT call, kept, spans FROM call_pictures WHERE rollout_key = ?", (rollout_key,))
    return {call: (kept, json.loads(spans)) for call, kept, spans in rows}


def _pictures_in(connection: sqlite3.Connection) -> Callable[[str], Picture]:
    """Return how a journal's images are found: in files beside it, or in a table where it is no file (a batch)."""
    if has(connection, "images"):
        return lambda sha256: read_image(connection, sha256)
    return ImageFolder(Path(connection.execute("PRAGMA database_list").fetchone()["file"])).picture


def _read_pictures(
    kept: int, own: list[Any], base: Call | None, find: Callable[[str], Picture] | None
) -> tuple[PictureSpan, ...]:
    assert find is not None
    known = () if base is None else base.pictures[:kept]
    return (*known, *(PictureSpan(picture=find(name), start=start, length=length) for name, start, length in own))


def _read_call(
    earlier: list[Call], row: sqlite3.Row, request: int | None, constraint: Constraint | None, *, lenient: bool
) -> Call:
    prompt_ids_P = ints(row["prompt_suffix"])
    messages = json.loads(row["messages_suffix"]) if lenient else _objects(row["messages_suffix"])
    if row["base"] is not None:
        base = earlier[row["base"]]
        history = np.concatenate([base.prompt_ids_P, base.sampled_ids_S])
        prompt_ids_P = np.concatenate([history[: row["prompt_kept"]], prompt_ids_P])
        messages = [*(*base.messages, base.response)[: row["messages_kept"]], *messages]
    return Call(
        index=row["idx"],
        parent=row["parent"],
        prompt_ids_P=prompt_ids_P,
        sampled_ids_S=ints(row["sampled"]),
        logprobs_S=floats(row["logprobs"]),
        versions_S=ints(row["versions"]),
        sampling=Sampling(
            temperature=row["temperature"],
            top_p=row["top_p"],
            top_k=row["top_k"],
            max_tokens=row["max_tokens"],
            stop=tuple(json.loads(row["stop"])),
        ),
        finish_reason=row["finish_reason"],
        status=CallStatus(row["status"]),
        messages=tuple(messages),
        tools=tuple(_objects(row["tools_json"])),
        response=json.loads(row["response"]) if lenient else _object(row["response"]),
        seconds=row["seconds"],
        request=request,
        constraint=constraint,
    )


def ints(blob: bytes) -> IntArray:
    """Decode an array of int32."""
    return np.frombuffer(blob, dtype=INT_BYTES).astype(np.int32, copy=False)


def floats(blob: bytes) -> FloatArray:
    """Decode an array of float32."""
    return np.frombuffer(blob, dtype=FLOAT_BYTES).astype(np.float32, copy=False)
