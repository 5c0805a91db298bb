"""The journal of a run: everything that happened, in one SQLite file (`run.db`), written by one thread.

In: scored groups and trained steps. Out: rows (`records` has the tables, `reading` the way back). `add` costs its
caller nothing but a queue entry; the writer takes whatever has gathered into one transaction. `flush` returns once
all of it is on disk, and is called before a group is trained.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from sharpen.errors import JournalError
from sharpen.experience.records import (
    SCHEMA,
    SCHEMA_VERSION,
    Delivery,
    TaughtRow,
    insert_checks,
    insert_group,
    insert_parity,
    insert_session,
    insert_step,
    insert_taught,
)
from sharpen.types import Check, Experience, Group

_LOOK_S = 1.0
"""How often a caller that waits for the writer looks whether that still lives."""


class _Item(NamedTuple):
    """Something to write, something to announce, or the end."""

    write: Callable[[sqlite3.Connection], None] | None = None
    done: threading.Event | None = None
    last: bool = False


class Journal:
    """Appends to `path`, which is created if it does not exist. Any thread may call; `close` it, or use `with`.

    `max_bytes` bounds the size of the file. After a failed write (a full disk) every further call raises
    `JournalError`: what could not be written is never silently given up, and a run cannot go on without its journal.
    """

    def __init__(self, path: Path | str, *, max_bytes: int | None = None) -> None:
        self.path = Path(path)
        self._connection = _open(self.path, max_bytes)
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._num_unsaved = 0
        self._closed = False
        self._session: str | None = None
        self._writer = threading.Thread(target=self._write_all, name="sharpen-journal", daemon=True)
        self._writer.start()

    def add(self, group: Group) -> None:
        """Take a group in, to be written soon. Raises `JournalError` if an earlier write failed."""
        self._write_soon(insert_group, group=group)

    def add_checks(self, step: int, checks: Iterable[Check]) -> None:
        """Take in what was found out about a step that is about to be trained."""
        self._write_soon(insert_checks, step=step, checks=tuple(checks))

    def add_taught(self, step: int, rows: Iterable[TaughtRow]) -> None:
        """Take in the rows that a step without rollouts is about to train."""
        self._write_soon(insert_taught, step=step, rows=tuple(rows))

    def begin(self, step: int, version: int) -> None:
        """Note that the steps to come are those of one session, which goes on behind `step` with weights of this policy
        version: which steps are behind which weights is said by it."""
        self._session = secrets.token_hex(8)
        self._write_soon(insert_session, session=self._session, step=step, version=version)

    def add_step(
        self,
        step: int,
        version: int,
        metrics: Mapping[str, float],
        experiences: Iterable[Experience] = (),
        delivery: Delivery | None = None,
    ) -> None:
        """Take a trained step in: the version it led to, its metrics, the experiences whose calls carried loss, and
        what the trainer received."""
        whole = {"experiences": tuple(experiences), "delivery": delivery, "session": self._session}
        self._write_soon(insert_step, step=step, version=version, metrics=metrics, **whole)

    def add_parity(self, measured: Mapping[str, Any]) -> None:
        """Take in what rounding was measured to be, by which engine and trainer are compared; the last session's is
        kept."""
        self._write_soon(insert_parity, measured=dict(measured))

    def flush(self) -> None:
        """Return once everything taken in so far is on disk. Raises `JournalError` if it is not."""
        done = threading.Event()
        self._put(_Item(done=done))
        while not done.wait(_LOOK_S) and self._writer.is_alive():
            pass
        self._raise_failure()
        assert done.is_set(), "the writer ends with the last item, or with a failure"

    def close(self) -> None:
        """Write what is left, close the file. Raises `JournalError` if something could not be written. Idempotent."""
        if not self._closed:
            self._closed = True
            self._items.put(_Item(last=True))
            self._writer.join()
            self._raise_failure()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write_soon(self, insert: Callable[..., None], **record: Any) -> None:
        self._put(_Item(write=partial(insert, **record)))

    def _put(self, item: _Item) -> None:
        self._raise_failure()
        if self._closed:
            raise JournalError(f"the journal {self.path} is closed")
        self._items.put(item)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise JournalError(
                f"the journal {self.path} could not be written ({type(self._failure).__name__}: {self._failure}); "
                f"{self._num_unsaved} groups or steps are not saved. Everything before them is. If the disk is full, "
                "free some space and continue the run from its last checkpoint"
            ) from self._failure

    def _write_all(self) -> None:
        """The writer thread: one transaction for whatever has gathered."""
        last = False
        while not last:
            items = [self._items.get()]
            while not self._items.empty():
                items.append(self._items.get())
            last = any(item.last for item in items)
            self._write([item.write for item in items if item.write is not None])
            for item in items:
                if item.done is not None:
                    item.done.set()
        self._connection.close()

    def _write(self, writes: list[Callable[[sqlite3.Connection], None]]) -> None:
        if not writes:
            return
        if self._failure is not None:
            self._num_unsaved += len(writes)
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for write in writes:
                write(self._connection)
            self._connection.execute("COMMIT")
        except BaseException as failure:  # the writer's boundary: kept, and raised at every later call
            self._num_unsaved += len(writes)
            self._failure = failure
            with contextlib.suppress(sqlite3.Error):  # what cannot be undone now SQLite undoes when it is next opened
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")


def _open(path: Path, max_bytes: int | None) -> sqlite3.Connection:
    try:
        # Opened here so that failure shows at once; from then on only the writer thread uses it.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise JournalError(f"cannot open the journal {path}: {error}") from error
    try:
        found = _prepare(connection, max_bytes)
    except sqlite3.Error as error:
        connection.close()
        raise JournalError(f"cannot open the journal {path}: {error}") from error
    if found != str(SCHEMA_VERSION):
        connection.close()
        raise JournalError(f"the journal {path} has schema version {found}; this Sharpen writes {SCHEMA_VERSION}")
    return connection


def _prepare(connection: sqlite3.Connection, max_bytes: int | None) -> str:
    """Set the connection up, create the tables where they are missing, and return the schema version found."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if max_bytes is not None:
        page_size = connection.execute("PRAGMA page_size").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_size)}")
    connection.executescript(SCHEMA)
    connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
    return str(connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0])
