"""Trims a journal: the text of the rollouts of old steps is dropped, everything else stays.

In: an open journal, the last step to trim. Out: calls without messages and answers, rollouts without tracebacks, and
the table `trimmed`, which names their groups. Token ids, logprobs, rewards, metrics and errors stay, and so does what
is stored once for many rollouts: tasks, tool schemas, images.

A call that is trimmed is written anew behind the last one. So whole pages become free, and the next rows take them;
calls that only became shorter would each leave a hole on their page, which nothing fills.
"""

from __future__ import annotations

import sqlite3

from sharpen.types import step_of_group

TRIMMED = "CREATE TABLE IF NOT EXISTS trimmed (group_key INTEGER PRIMARY KEY REFERENCES groups (key))"

_KEPT = (
    *("rollout_key", "idx", "parent", "base", "status", "finish_reason", "temperature", "top_p", "top_k", "max_tokens"),
    *("stop", "prompt_kept", "prompt_suffix", "sampled", "logprobs", "versions", "tools", "seconds"),
)
_DROPPED = {"messages_kept": "0", "messages_suffix": "'[]'", "response": "'{}'"}
_REWRITE = (
    f"INSERT OR REPLACE INTO calls ({', '.join((*_KEPT, *_DROPPED))})"
    f" SELECT {', '.join((*_KEPT, *_DROPPED.values()))} FROM calls"
    " WHERE rollout_key IN (SELECT key FROM rollouts WHERE group_key = ?) ORDER BY rollout_key, idx"
)
_TRACEBACKS = (
    "UPDATE rollout_notes SET traceback = NULL WHERE traceback IS NOT NULL"
    " AND rollout_key IN (SELECT key FROM rollouts WHERE group_key = ?)"
)


def drop_text(connection: sqlite3.Connection, until: int) -> None:
    """Drop the text of the rollouts that were made for steps up to `until`, of all that still have it. An evaluation
    after a step, whose group ids begin with `step-<number>` as those of earlier versions did, counts for the next."""
    connection.execute("PRAGMA secure_delete = ON")  # what is dropped does not stay readable on free pages
    connection.execute(TRIMMED)
    groups = connection.execute("SELECT key, id FROM groups WHERE key NOT IN (SELECT group_key FROM trimmed)")
    old = [(key,) for key, id_ in groups.fetchall() if (step := step_of_group(id_)) is not None and step <= until]
    for statement in (_REWRITE, _TRACEBACKS, "INSERT INTO trimmed VALUES (?)"):
        connection.executemany(statement, old)
