"""Reads from a journal what the index keeps of each group and rollout.

In: an open journal, the key of a group. Out: `GroupEntry`s of the groups after it, with their rollouts' numbers and
text. Token arrays are not read, only their lengths.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpen.agent.transcript import TRIMMED, clean_for_page, message_text, tool_calls
from sharpen.learning.experience.opening import has
from sharpen.learning.experience.records import CHECK
from sharpen.types import Outcome, step_of_group

TRAINING = "training"
"""The place of rollouts that were made to train on; an evaluation's is `<dataset>/<mode>`."""
QUESTION_CHARACTERS = ANSWER_CHARACTERS = ERROR_CHARACTERS = 400


@dataclass(slots=True, kw_only=True)
class RolloutEntry:
    """A rollout, as the index keeps it. `kind` is the journal's `is_final`. `length` is the longest sequence of ids
    that a call ended with; `oldest` and `newest` are the policy versions that sampled it."""

    number: int
    id: str
    kind: int
    index: int
    attempt: int
    outcome: str
    reward: float | None
    seconds: float
    error: str
    calls: int = 0
    tokens: int = 0
    length: int = 0
    oldest: int | None = None
    newest: int | None = None
    question: str = ""
    answer: str = ""
    tools: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)

    @property
    def takes_part(self) -> bool:
        """Whether its reward counts in its group."""
        return self.outcome != Outcome.FILTERED

    @property
    def text(self) -> str:
        """All that was said, and the error; half characters, which SQLite does not take, are replaced."""
        return "\n".join([*self.texts, self.error]).encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """A group, as the index keeps it. `moment` is when an evaluation was (`before`, `step-4`, `after`), empty for
    training."""

    number: int
    id: str
    task: str
    place: str
    moment: str
    step: int | None
    version: int
    rollouts: tuple[RolloutEntry, ...]


def read_entries(source: sqlite3.Connection, *, after: int, most: int, number: int) -> list[GroupEntry]:
    """Return up to `most` groups after a key. `number` is 0 for the journal of the training, 1 for the evaluations'."""
    groups = source.execute(
        "SELECT key, id, version, task_id FROM groups WHERE key > ? ORDER BY key LIMIT ?", (after, most)
    ).fetchall()
    if not groups:
        return []
    rollouts: dict[int, RolloutEntry] = {}
    by_group: dict[int, list[RolloutEntry]] = {}
    for row in source.execute(
        "SELECT key, group_key, is_final, id, idx, attempt, outcome, reward, seconds, error FROM rollouts"
        " WHERE group_key BETWEEN ? AND ? ORDER BY key",
        (groups[0]["key"], groups[-1]["key"]),
    ):
        entry = rollouts[row["key"]] = _entry(row, number)
        by_group.setdefault(row["group_key"], []).append(entry)
    if rollouts:
        _add_calls(source, rollouts)
    for key in _trimmed(source, groups[0]["key"], groups[-1]["key"]):
        for entry in by_group.get(key, ()):
            entry.answer = f"({TRIMMED})"
    return [_group(source, row, number, tuple(by_group.get(row["key"], ()))) for row in groups]


def read_text(source: sqlite3.Connection, key: int) -> str:
    """Return all text of the rollout with this key, as it is in the index."""
    row = source.execute("SELECT * FROM rollouts WHERE key = ?", (key,)).fetchone()
    if row is None:
        return ""
    entry = _entry(row, 0)
    _add_calls(source, {key: entry})
    return entry.text


def _trimmed(source: sqlite3.Connection, first: int, last: int) -> list[int]:
    """Return the keys of the groups, between two, whose text was dropped; none in a journal without this table."""
    if not has(source, "trimmed"):
        return []
    rows = source.execute("SELECT group_key FROM trimmed WHERE group_key BETWEEN ? AND ?", (first, last))
    return [key for (key,) in rows]


def _entry(row: sqlite3.Row, number: int) -> RolloutEntry:
    return RolloutEntry(
        number=2 * row["key"] + number,
        id=row["id"],
        kind=row["is_final"],
        index=row["idx"],
        attempt=row["attempt"],
        outcome=row["outcome"],
        reward=row["reward"],
        seconds=row["seconds"],
        error=clean_for_page(row["error"] or "")[:ERROR_CHARACTERS],
    )


def _group(source: sqlite3.Connection, row: sqlite3.Row, number: int, rollouts: tuple[RolloutEntry, ...]) -> GroupEntry:
    place, moment, step = (TRAINING, "", step_of_group(row["id"])) if number == 0 else _evaluated(source, row)
    return GroupEntry(
        number=2 * row["key"] + number,
        id=row["id"],
        task=row["task_id"],
        place=place,
        moment=moment,
        step=step,
        version=row["version"],
        rollouts=rollouts,
    )


def _evaluated(source: sqlite3.Connection, row: sqlite3.Row) -> tuple[str, str, int | None]:
    """Return the place, the moment and the step of an evaluated group, whose id is `<when>/<dataset>/<mode>/<task>`, or
    of one of the check before training."""
    moment, _, rest = row["id"].partition("/")
    if moment == CHECK:
        return CHECK, CHECK, 0
    place = rest.removesuffix(f"/{row['task_id']}")
    name, _, number = moment.rpartition("-")
    if name == "step" and number.isdigit():
        return place, moment, int(number)
    return place, moment, 0 if moment == "before" else None


def _add_calls(source: sqlite3.Connection, rollouts: Mapping[int, RolloutEntry]) -> None:
    """Add what the calls of these rollouts, which follow each other in the journal, say."""
    for row in source.execute(
        "SELECT rollout_key, prompt_kept + length(prompt_suffix) / 4 AS prompt, length(sampled) / 4 AS sampled, status,"
        " substr(versions, 1, 4) AS first, substr(versions, -4) AS last, messages_suffix, response FROM calls"
        " WHERE rollout_key BETWEEN ? AND ? ORDER BY rollout_key, idx",
        (min(rollouts), max(rollouts)),
    ):
        entry = rollouts[row["rollout_key"]]
        entry.calls += 1
        entry.tokens += row["sampled"]
        entry.length = max(entry.length, row["prompt"] + row["sampled"])
        versions = [int.from_bytes(row[name], "little", signed=True) for name in ("first", "last") if row[name]]
        entry.oldest = min([*versions, *([] if entry.oldest is None else [entry.oldest])], default=None)
        entry.newest = max([*versions, *([] if entry.newest is None else [entry.newest])], default=None)
        _add_messages(entry, _json(row["messages_suffix"]), _json(row["response"]))


def _add_messages(entry: RolloutEntry, messages: Any, response: Any) -> None:
    said = [message for message in messages if isinstance(message, Mapping)] if isinstance(messages, Sequence) else []
    if not entry.question:
        asked = next((message for message in said if message.get("role") in ("user", "prompt")), None)
        entry.question = _line(message_text(asked), QUESTION_CHARACTERS) if asked else ""
    answer = response if isinstance(response, Mapping) else {}
    entry.texts += [message_text(message) for message in (*said, answer)]
    for name, _ in tool_calls(answer):
        entry.tools[clean_for_page(name)] += 1
    if text := message_text(answer):
        entry.answer = _line(text, ANSWER_CHARACTERS)


def _line(text: str, most: int) -> str:
    """Return a text on one line, cut."""
    return clean_for_page(" ".join(text[: 4 * most].split()))[:most]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
