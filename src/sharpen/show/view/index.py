"""The side index of a run: what pages list, sort, filter and search, so that no page reads the whole journal.

In: `run.db` and `evaluations.db`, opened for reading. Out: `view.db` in the user's cache folder: one row for each
rollout and each group, and a full-text index over messages, tool calls and their results, answers and errors. It grows
with the run, from the last group that it has; it is made anew if it belongs to another run or another version of this
file. It may always be deleted.

Rollouts and groups are numbered as in their journal: `2 * key`, plus 1 for those of evaluations, so that links to them
outlive the index.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from sharpen.errors import JournalError
from sharpen.files import write_whole
from sharpen.learning.experience.opening import open_journal
from sharpen.show.view.entries import GroupEntry, RolloutEntry, read_entries
from sharpen.show.view.folders import Folder, path_digest

FORMAT = "1"
"""Changed whenever the tables below, or what is written into them, change."""
GROUPS_AT_ONCE = 48
BUSY_S = 10.0
MAX_REMADE = 3
"""How often an index is made anew before its disk is taken to be the cause."""
_UNSPACED = re.compile("[\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
"""Thai and Lao, kana, Chinese characters."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
    number INTEGER PRIMARY KEY, group_number INTEGER NOT NULL, id TEXT NOT NULL, task TEXT NOT NULL,
    place TEXT NOT NULL, moment TEXT NOT NULL, step INTEGER, kind INTEGER NOT NULL, idx INTEGER NOT NULL,
    attempt INTEGER NOT NULL, outcome TEXT NOT NULL, reward REAL, calls INTEGER NOT NULL, tokens INTEGER NOT NULL,
    length INTEGER NOT NULL, oldest INTEGER, newest INTEGER, seconds REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS rollouts_group ON rollouts (group_number);
CREATE INDEX IF NOT EXISTS rollouts_task ON rollouts (place, task);
CREATE INDEX IF NOT EXISTS rollouts_step ON rollouts (place, step);
CREATE INDEX IF NOT EXISTS rollouts_id ON rollouts (id);
CREATE INDEX IF NOT EXISTS rollouts_outcome ON rollouts (outcome);
CREATE TABLE IF NOT EXISTS words (
    number INTEGER PRIMARY KEY, question TEXT NOT NULL, answer TEXT NOT NULL, error TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tools (
    number INTEGER NOT NULL, tool TEXT NOT NULL, times INTEGER NOT NULL, PRIMARY KEY (number, tool)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tools_tool ON tools (tool, number);
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL, task TEXT NOT NULL, place TEXT NOT NULL, moment TEXT NOT NULL,
    step INTEGER, version INTEGER NOT NULL, size INTEGER NOT NULL, scored INTEGER NOT NULL, mean REAL, std REAL,
    low REAL, high REAL
);
CREATE INDEX IF NOT EXISTS groups_task ON groups (place, task);
CREATE INDEX IF NOT EXISTS groups_step ON groups (place, step);
CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5(
    text, content='', columnsize=0, tokenize="unicode61 remove_diacritics 2"
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexState:
    """How far an index is: rollouts in it, and in the journals. `problems` says why some cannot be read."""

    indexed: int
    total: int
    problems: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all rollouts are in it."""
        return self.indexed >= self.total


class IndexMadeAnewError(JournalError):
    """An index was found damaged, and is being made anew: ask again."""


class Index:
    """The index of one run, in a folder below `cache`. Several threads may read while one updates it; two processes may
    share it. One that turns out to be damaged is made anew."""

    def __init__(self, folder: Folder, cache: Path) -> None:
        self.folder = folder
        self._place = cache / path_digest(folder.path)
        self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._place / "path", os.fsencode(f"{folder.path}\n"), lasting=False)
        self._path = self._place / "view.db"
        self.problem = ""
        """Why it could not be updated the last time."""
        self._remaking = threading.Lock()
        self._num_remade = 0
        self._prepare()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open the index for a page. Raises `IndexMadeAnewError` if it turns out to be damaged."""
        try:
            with closing(self._connect()) as connection:
                connection.execute("PRAGMA query_only = 1")
                yield connection
        except sqlite3.DatabaseError as error:
            if not self._remade_if_damaged():
                raise
            raise IndexMadeAnewError(f"the index of {self.folder.path} was damaged: it is made anew") from error

    def update(self) -> bool:
        """Add the next groups of each journal; whether there may be more of them."""
        more = False
        try:
            for number, journal in enumerate((self.folder.journal, self.folder.evaluations)):
                if journal.exists():
                    more |= self._add_groups(journal, number)
        except sqlite3.DatabaseError:
            if not self._remade_if_damaged():
                raise
            more = True
        return more

    def state(self) -> IndexState:
        """Return how far the index is."""
        problems = [f"the rollouts cannot be indexed: {self.problem}"] if self.problem else []
        total = 0
        for journal in (self.folder.journal, self.folder.evaluations):
            if journal.exists():
                try:
                    with closing(open_journal(journal)) as connection:
                        total += connection.execute("SELECT COUNT(*) FROM rollouts").fetchone()[0]
                except (JournalError, sqlite3.Error) as error:
                    problems.append(f"{journal.name} cannot be read: {reason(error)}")
        with self.reading() as index:
            indexed = index.execute("SELECT COUNT(*) FROM rollouts").fetchone()[0]
        return IndexState(indexed=indexed, total=max(total, indexed), problems=tuple(problems))

    def _prepare(self) -> None:
        """Make the tables; make them anew if the file is another version's, or damaged."""
        try:
            with closing(self._connect()) as connection:
                _make_tables(connection)
                found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
                if found is not None and found[0] == FORMAT and _tables(connection) == _tables_of_this_version():
                    return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:  # locked, not writable: no fault of its tables
                raise
        except sqlite3.DatabaseError:  # not a database, or a torn one
            pass
        self._forget()
        with closing(self._connect()) as connection:
            _make_tables(connection)

    def _remade_if_damaged(self) -> bool:
        """Look after an error whether the index is damaged, and then make it anew. The error may be another file's."""
        with self._remaking:
            if self._num_remade >= MAX_REMADE or self._is_whole():
                return False
            self._num_remade += 1
            self._forget()
            self._prepare()
            return True

    def _is_whole(self) -> bool:
        try:
            with closing(self._connect()) as connection:
                if _tables(connection) != _tables_of_this_version():
                    return False
                connection.execute("INSERT INTO texts (texts) VALUES ('integrity-check')")
                return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        except sqlite3.OperationalError:  # locked, not writable
            return True
        except sqlite3.DatabaseError:
            return False

    def _forget(self) -> None:
        for name in ("view.db", "view.db-wal", "view.db-shm"):
            (self._place / name).unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")  # it can be made again
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _add_groups(self, journal: Path, number: int) -> bool:
        """Add the next groups of a journal in one transaction, in which their place is looked up: another process may
        have gone on meanwhile."""
        with closing(open_journal(journal)) as source, closing(self._connect()) as index:
            index.execute("BEGIN IMMEDIATE")
            done = _done(index, number)
            if done and _fingerprint(source) != _known(index, number):
                index.execute("ROLLBACK")
                self._empty(index)
                return True
            groups = read_entries(source, after=done, most=GROUPS_AT_ONCE, number=number)
            for group in groups:
                _insert_group(index, group)
            if groups:
                _note(index, f"done {number}", groups[-1].number // 2)
                _note(index, f"fingerprint {number}", _fingerprint(source))
            index.execute("COMMIT")
        return len(groups) == GROUPS_AT_ONCE

    def _empty(self, index: sqlite3.Connection) -> None:
        """Empty the index: another run is in its run's place."""
        index.execute("BEGIN IMMEDIATE")
        for table in ("rollouts", "words", "tools", "groups"):
            index.execute(f"DELETE FROM {table}")
        index.execute("INSERT INTO texts (texts) VALUES ('delete-all')")
        index.execute("DELETE FROM meta WHERE key <> 'format'")
        index.execute("COMMIT")


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.executescript(_SCHEMA)
    connection.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (FORMAT,))


def _tables(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return how each table and index of a file was made."""
    sql = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    return [(name, text) for name, text in connection.execute(sql)]


@functools.cache
def _tables_of_this_version() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        _make_tables(connection)
        return _tables(connection)


def _insert_group(index: sqlite3.Connection, group: GroupEntry) -> None:
    rewards = [one.reward for one in group.rollouts if one.kind == 1 and one.takes_part and one.reward is not None]
    _insert(
        index,
        "groups",
        number=group.number,
        id=group.id,
        task=group.task,
        place=group.place,
        moment=group.moment,
        step=group.step,
        version=group.version,
        size=sum(one.kind == 1 for one in group.rollouts),
        scored=len(rewards),
        mean=fmean(rewards) if rewards else None,
        std=pstdev(rewards) if rewards else None,
        low=min(rewards, default=None),
        high=max(rewards, default=None),
    )
    for rollout in group.rollouts:
        _insert_rollout(index, group, rollout)


def _insert_rollout(index: sqlite3.Connection, group: GroupEntry, rollout: RolloutEntry) -> None:
    _insert(
        index,
        "rollouts",
        number=rollout.number,
        group_number=group.number,
        id=rollout.id,
        task=group.task,
        place=group.place,
        moment=group.moment,
        step=group.step,
        kind=rollout.kind,
        idx=rollout.index,
        attempt=rollout.attempt,
        outcome=rollout.outcome,
        reward=rollout.reward,
        calls=rollout.calls,
        tokens=rollout.tokens,
        length=rollout.length,
        oldest=rollout.oldest,
        newest=rollout.newest,
        seconds=rollout.seconds,
    )
    words = {"question": rollout.question, "answer": rollout.answer, "error": rollout.error}
    _insert(index, "words", number=rollout.number, **words)
    for tool, times in rollout.tools.items():
        _insert(index, "tools", tool=tool, number=rollout.number, times=times)
    index.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (rollout.number, apart(rollout.text)))


def _insert(index: sqlite3.Connection, table: str, **values: Any) -> None:
    names, places = ", ".join(values), ", ".join("?" * len(values))
    index.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", tuple(values.values()))


def apart(text: str) -> str:
    """Put spaces around the characters of languages written without them, so that each is a word of the index."""
    return _UNSPACED.sub(r" \g<0> ", text)


def _done(index: sqlite3.Connection, number: int) -> int:
    """The key of the last group of a journal that the index has; 0 for none."""
    found = index.execute("SELECT value FROM meta WHERE key = ?", (f"done {number}",)).fetchone()
    return int(found[0]) if found else 0


def _known(index: sqlite3.Connection, number: int) -> str:
    found = index.execute("SELECT value FROM meta WHERE key = ?", (f"fingerprint {number}",)).fetchone()
    return str(found[0]) if found else ""


def _fingerprint(source: sqlite3.Connection) -> str:
    """What tells a journal from one that took its place: its first rollout, to the digits of its seconds."""
    found = source.execute("SELECT id, seconds, reward FROM rollouts ORDER BY key LIMIT 1").fetchone()
    return json.dumps(tuple(found) if found else None)


def _note(index: sqlite3.Connection, name: str, value: Any) -> None:
    index.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, str(value)))


def reason(error: Exception) -> str:
    """Return an error's first line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
