"""What a recording adds to a journal: sessions that grow call by call, and rewards that come later.

In: sessions, calls and rewards, one at a time, and an open connection. Out: rows of the journal's own tables, so that a
session is a rollout in a group of its own; beside them two tables, which say whose sessions they are and by which name
the server gave each answer.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sharpen.learning.experience.opening import has, reading
from sharpen.learning.experience.reading import read_groups_at
from sharpen.learning.experience.records import insert_call, insert_group, insert_note
from sharpen.types import Call, CallStatus, Group, IntArray, Outcome, Rollout, Task

TABLES = (
    "CREATE TABLE IF NOT EXISTS recorded (session TEXT PRIMARY KEY, rollout_key INTEGER NOT NULL, key BLOB NOT NULL,"
    " own INTEGER NOT NULL, opened REAL NOT NULL, used REAL NOT NULL, ended INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS answers (name TEXT PRIMARY KEY, session TEXT NOT NULL, call INTEGER NOT NULL)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A session that had not ended: a digest of the key of its calls, whether that key is the session's `own`, when it
    was opened and last used (seconds since 1970), its task and its calls."""

    session: str
    key: bytes
    own: bool
    opened: float
    used: float
    task: Task
    calls: tuple[Call, ...]


def create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables that only a recording has."""
    for table in TABLES:
        connection.execute(table)


def group_id(session: str, task: Task) -> str:
    """Return the id of a session's group: it begins with the session's and ends with the task's."""
    return f"{session}/{task.id}" if task.id else session


def insert_session_opened(
    connection: sqlite3.Connection, session: str, key: bytes, own: bool, task: Task, opened: float
) -> None:
    """Write a session without calls. `key` is a digest of the key of its calls, `own` whether no others have it."""
    id_ = group_id(session, task)
    rollout = Rollout(
        id=f"{id_}/0",
        group_id=id_,
        task_id=task.id,
        index=0,
        attempt=0,
        calls=(),
        outcome=Outcome.OK,
        reward=None,
        started=opened,
    )
    insert_group(connection, Group(id=id_, task=task, version=0, rollouts=(rollout,)))
    connection.execute(
        "INSERT INTO recorded SELECT ?, MAX(key), ?, ?, ?, ?, 0 FROM rollouts", (session, key, own, opened, opened)
    )


def insert_answer(
    connection: sqlite3.Connection,
    session: str,
    name: str,
    earlier: Sequence[Call],
    histories: Sequence[IntArray],
    calls: Sequence[Call],
    used: float,
) -> None:
    """Write the calls of an answer, which the server calls `name`, behind the `earlier` ones of its session."""
    (rollout_key,) = connection.execute("SELECT rollout_key FROM recorded WHERE session = ?", (session,)).fetchone()
    for call in calls:
        insert_call(connection, rollout_key, earlier, histories, call)
        if call.request is not None:
            insert_note(connection, rollout_key, call.index, step_reward=None, state=None, request=call.request)
    if name:
        connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (name, session, calls[0].index))
    connection.execute("UPDATE recorded SET used = ? WHERE session = ?", (used, session))
    connection.execute(
        "UPDATE rollouts SET seconds = ? - (SELECT opened FROM recorded WHERE session = ?) WHERE key = ?",
        (used, session, rollout_key),
    )


def update_reward(connection: sqlite3.Connection, session: str, reward: float, call: int | None) -> None:
    """Write the reward of a session, or of one of its calls, which is then the session's too."""
    key, text = connection.execute(
        "SELECT key, call_rewards FROM rollouts WHERE key = (SELECT rollout_key FROM recorded WHERE session = ?)",
        (session,),
    ).fetchone()
    rewards = json.loads(text) | ({} if call is None else {str(call): reward})
    connection.execute(
        "UPDATE rollouts SET reward = ?, call_rewards = ? WHERE key = ?", (reward, json.dumps(rewards), key)
    )


def update_ended(connection: sqlite3.Connection, session: str, statuses: Mapping[int, CallStatus]) -> None:
    """Write that a session has ended, and the status of calls that is known only then."""
    connection.execute("UPDATE recorded SET ended = 1 WHERE session = ?", (session,))
    connection.executemany(
        "UPDATE calls SET status = ? WHERE idx = ?"
        " AND rollout_key = (SELECT rollout_key FROM recorded WHERE session = ?)",
        [(status.value, index, session) for index, status in statuses.items()],
    )


def is_recording(path: Path | str) -> bool:
    """Whether a journal is that of a recording."""
    with reading(path) as connection:
        return has(connection, "recorded")


def read_open_sessions(path: Path | str) -> list[OpenSession]:
    """Return the sessions that had not ended when the journal was last written."""
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT recorded.*, group_key FROM recorded JOIN rollouts ON rollouts.key = rollout_key WHERE NOT ended"
            " ORDER BY opened"
        ).fetchall()
    groups = read_groups_at(path, [row["group_key"] for row in rows], most_bytes=math.inf)
    return [
        OpenSession(
            **{name: row[name] for name in ("session", "key", "opened", "used")},
            own=bool(row["own"]),
            task=group.task,
            calls=group.rollouts[0].calls,
        )
        for row, group in zip(rows, groups, strict=True)
    ]


def is_own_key(path: Path | str, key: bytes) -> bool:
    """Whether a digest is that of a session's own key, which may have ended."""
    with reading(path) as connection:
        found = connection.execute("SELECT 1 FROM recorded WHERE key = ? AND own", (key,)).fetchone()
    return found is not None


def find_session(path: Path | str, session: str) -> bool:
    """Whether there is a session of this id."""
    with reading(path) as connection:
        found = connection.execute("SELECT 1 FROM recorded WHERE session = ?", (session,)).fetchone()
    return found is not None


def find_answer(path: Path | str, name: str) -> tuple[str, int] | None:
    """Return the session and the call of the answer that the server called `name`; None if there is none."""
    with reading(path) as connection:
        found = connection.execute("SELECT session, call FROM answers WHERE name = ?", (name,)).fetchone()
    return None if found is None else (found["session"], found["call"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCounts:
    """What a recording holds: sessions (still open, with a reward and its mean), calls and tokens; and calls without
    token ids, abandoned, cut at their token limit, and `apart`: with ids that continue no earlier call, though their
    session has one."""

    sessions: int
    open: int
    rated: int
    mean_reward: float | None
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    without_ids: int
    abandoned: int
    cut: int
    apart: int


def count_recorded(path: Path | str) -> RecordedCounts:
    """Count what a recording holds."""
    with reading(path) as connection:
        sessions = connection.execute(
            "SELECT COUNT(*) AS sessions, COALESCE(SUM(NOT ended), 0) AS open, COUNT(reward) AS rated,"
            " AVG(reward) AS mean_reward FROM recorded JOIN rollouts ON rollouts.key = rollout_key"
        ).fetchone()
        calls = connection.execute(
            "SELECT COUNT(*) AS calls, COALESCE(SUM(prompt_kept + length(prompt_suffix) / 4), 0) AS prompt_tokens,"
            " COALESCE(SUM(length(sampled) / 4), 0) AS sampled_tokens,"
            " COALESCE(SUM(length(sampled) = 0), 0) AS without_ids,"
            " COALESCE(SUM(status = 'abandoned'), 0) AS abandoned,"
            " COALESCE(SUM(finish_reason = 'length'), 0) AS cut,"
            " COALESCE(SUM(parent IS NULL AND idx > 0 AND length(sampled) > 0), 0) AS apart FROM calls"
        ).fetchone()
    return RecordedCounts(**dict(sessions), **dict(calls))
