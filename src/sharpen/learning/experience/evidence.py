"""Reads from a journal what the certificate needs: the data passed to the trainer, the groups of each step, and the
sessions. Older journals do not have these tables.

Shape suffix: S loss tokens of a call.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.learning.experience.expansion import refuse_more_than_memory
from sharpen.learning.experience.opening import has, reading
from sharpen.learning.experience.reading import floats, ints
from sharpen.learning.experience.records import Delivery, GroupPlace, LossSpan
from sharpen.types import FloatArray

_TOKEN_BYTES = 12
"""Of a loss token: its place, its advantage, its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """A session, which continued after `step` with weights of this policy version."""

    id: str
    step: int
    version: int


def read_sessions(path: Path | str) -> list[SessionRecord]:
    """Return the sessions that wrote to the journal, in order; none for an older journal."""
    with reading(path) as connection:
        if not has(connection, "sessions"):
            return []
        rows = connection.execute("SELECT id, step, version FROM sessions ORDER BY key").fetchall()
    return [SessionRecord(**dict(row)) for row in rows]


def read_repeated(path: Path | str) -> list[tuple[int, str, dict[str, Any]]]:
    """Return what was found when the updates of steps were made once more while the run trained: the step, the session
    that trained it, and what `Journal.add_repeated` was given; none for an older journal."""
    with reading(path) as connection:
        if not has(connection, "repeated"):
            return []
        rows = connection.execute("SELECT step, session, found FROM repeated ORDER BY rowid").fetchall()
        return [(step, session, json.loads(found)) for step, session, found in rows]


def read_gradients(path: Path | str) -> list[tuple[int, str, dict[str, Any]]]:
    """Return what was found when the trainer's gradients were compared: the step after which, the session, and what
    `Journal.add_gradients` was given; none for an older journal."""
    with reading(path) as connection:
        if not has(connection, "gradients"):
            return []
        rows = connection.execute("SELECT step, session, found FROM gradients ORDER BY rowid").fetchall()
        return [(step, session, json.loads(found)) for step, session, found in rows]


def read_delivery(path: Path | str, step: int) -> Delivery | None:
    """Return the data passed to the trainer in a step, without the sequences; None if it was not recorded. Raises
    `JournalError` for more tokens than the memory of this machine holds."""
    with reading(path) as connection:
        if not has(connection, "step_groups"):
            return None
        places = connection.execute("SELECT * FROM step_groups WHERE step = ? ORDER BY rowid", (step,)).fetchall()
        rows = connection.execute("SELECT * FROM spans WHERE step = ? ORDER BY rowid", (step,)).fetchall()
        spans = tuple(_spans(rows))
    if not places:
        return None
    return Delivery(
        spans=spans,
        places=tuple(
            GroupPlace(
                group_id=row["group_id"],
                update=row["update_number"],
                left_out=row["left_out"],
                replayed=bool(row["replayed"]),
            )
            for row in places
        ),
    )


def read_step_groups(path: Path | str) -> dict[int, list[tuple[int, bool]]]:
    """Return for each recorded step the keys of its groups in the journal, and whether they were replayed."""
    with reading(path) as connection:
        if not has(connection, "step_groups"):
            return {}
        rows = connection.execute("SELECT step, group_key, replayed FROM step_groups ORDER BY rowid").fetchall()
    groups: dict[int, list[tuple[int, bool]]] = {}
    for step, key, replayed in rows:
        groups.setdefault(step, []).append((key, bool(replayed)))
    return groups


def read_rollout_spans(connection: sqlite3.Connection, rollout_id: str, steps: Iterable[int]) -> list[LossSpan]:
    """Return the loss tokens of a rollout in these steps of an open journal, without the sequences; none for an older
    journal."""
    if not has(connection, "spans"):
        return []
    sql = "SELECT * FROM spans WHERE step = ? AND rollout_id = ? ORDER BY rowid"
    return list(_spans([row for step in steps for row in connection.execute(sql, (step, rollout_id))]))


def read_group_steps(connection: sqlite3.Connection, group_id: str) -> list[tuple[int, str | None]]:
    """Return the steps of an open journal that drew a group, and why it was left out of each (None: it was not); none
    for an older journal."""
    if not has(connection, "step_groups"):
        return []
    sql = "SELECT step, left_out FROM step_groups WHERE group_id = ? ORDER BY step"
    return [(step, left_out) for step, left_out in connection.execute(sql, (group_id,))]


def refuse_too_many(counts: Iterable[int], most_bytes: float | None = None) -> None:
    """Check the numbers of loss tokens of a step's spans: a row of a few bytes says how many it stands for. Raises
    `ValueError` for one that no call has, `JournalError` if all need more memory than `most_bytes`: by default that of
    this machine."""
    total = 0
    for count in counts:
        if not 0 <= count < 1 << 31:
            raise ValueError(f"a call of {count} loss tokens: no run made it")
        total += count
    refuse_more_than_memory(_TOKEN_BYTES * total, f"the {total} loss tokens of a step", most_bytes)


def _spans(rows: Sequence[sqlite3.Row]) -> Iterator[LossSpan]:
    refuse_too_many([row["num_tokens"] for row in rows])
    yield from map(_span, rows)


def _span(row: sqlite3.Row) -> LossSpan:
    count = row["num_tokens"]
    first = row["first"]
    return LossSpan(
        update=row["update_number"],
        sequence=row["sequence"],
        group_id=row["group_id"],
        rollout_id=row["rollout_id"],
        call=row["call"],
        places_S=np.arange(first, first + count, dtype=np.int32) if row["places"] is None else ints(row["places"]),
        advantages_S=_numbers(row["advantage"], row["advantages"], count),
        weights_S=_numbers(row["weight"], row["weights"], count),
        ids=row["ids"],
        records=row["records"],
    )


def _numbers(constant: float | None, blob: bytes | None, count: int) -> FloatArray:
    return np.full(count, constant, np.float32) if blob is None else floats(blob)
