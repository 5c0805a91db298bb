"""The journal of a run: a SQLite file (`run.db`) with everything that happened, written by one thread.

In: scored groups and trained steps. Out: rows (`records` defines the tables, `reading` reads them). `add` only puts an
item into a queue; the writer thread writes all queued items in one transaction. `flush` returns once all of them are on
disk, and is called before a group is trained.
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
from sharpen.learning.experience.entropies import add_ratio_columns, insert_entropies
from sharpen.learning.experience.images import ImageFolder, pictures_of
from sharpen.learning.experience.records import (
    SCHEMA,
    SCHEMA_VERSION,
    Delivery,
    TaughtRow,
    insert_checks,
    insert_gradients,
    insert_group,
    insert_parity,
    insert_repeated,
    insert_session,
    insert_step,
    insert_taught,
)
from sharpen.types import CallEntropies, Check, Experience, Group, Picture, step_of_group

# Trims a journal: the text of the rollouts of old steps is dropped, everything else stays.
#
# In: an open journal, the last step to trim. Out: calls without messages and answers, rollouts without tracebacks, and
# the table `trimmed`, which names their groups. Token ids, logprobs, rewards, metrics and errors stay, and so does what
# is stored once for many rollouts: tasks, tool schemas, images.
#
# A call that is trimmed is written anew behind the last one. So whole pages become free, and the next rows take them;
# calls that only became shorter would each leave a hole on their page, which nothing fills.

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


_POLL_S = 1.0
"""How often `flush` checks that the writer thread is still alive."""


class _Item(NamedTuple):
    """An item for the writer thread: a write, the step that it completes and the images that it names; an event to set
    once all before it is written; or the end."""

    write: Callable[[sqlite3.Connection], None] | None = None
    step: int | None = None
    pictures: tuple[Picture, ...] = ()
    done: threading.Event | None = None
    last: bool = False


class Journal:
    """Appends to the journal at `path`, creating it if necessary. Thread-safe. Call `close`, or use it in `with`.

    `max_bytes` limits the size of the file. After a failed write, for example on a full disk, every further call raises
    `JournalError`, since a run must not continue without its journal.
    """

    def __init__(self, path: Path | str, *, max_bytes: int | None = None) -> None:
        self.path = Path(path)
        self._connection = _open(self.path, max_bytes)
        self._images = ImageFolder(self.path)
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._num_unsaved = 0
        self._steps: set[int] = set()
        self._closed = False
        self._session: str | None = None
        self._writer = threading.Thread(target=self._write_all, name="sharpen-journal", daemon=True)
        self._writer.start()

    def add(self, group: Group) -> None:
        """Queue a group for writing. Raises `JournalError` if an earlier write failed, as all methods do."""
        self._put(_Item(write=partial(insert_group, group=group), pictures=tuple(pictures_of(group))))

    def add_checks(self, step: int, checks: Iterable[Check]) -> None:
        """Queue the checks of a step that is about to be trained."""
        self._write_soon(insert_checks, step=step, checks=tuple(checks))

    def add_taught(self, step: int, rows: Iterable[TaughtRow]) -> None:
        """Queue the rows that a supervised step is about to train on."""
        self._write_soon(insert_taught, step=step, rows=tuple(rows))

    def begin(self, step: int, version: int) -> None:
        """Start a session, which continues after `step` with weights of this policy version. It is recorded with each
        step that follows, so that readers know which weights a step started from."""
        self._session = secrets.token_hex(8)
        self._write_soon(insert_session, session=self._session, step=step, version=version)

    def add_step(
        self,
        step: int,
        version: int,
        metrics: Mapping[str, float],
        experiences: Iterable[Experience] = (),
        delivery: Delivery | None = None,
        entropies: Iterable[CallEntropies] = (),
    ) -> None:
        """Queue a trained step: the policy version after it, its metrics, the experiences that were trained, the data
        passed to the trainer, and the entropies and ratios of the tokens."""
        write = partial(
            insert_step,
            step=step,
            version=version,
            metrics=metrics,
            experiences=tuple(experiences),
            delivery=delivery,
            session=self._session,
        )
        self._put(_Item(write=write, step=step))
        self._write_soon(insert_entropies, step=step, calls=tuple(entropies))

    def add_parity(self, measured: Mapping[str, Any]) -> None:
        """Queue the measured rounding, the tolerance between engine and trainer. It replaces that of earlier
        sessions."""
        self._write_soon(insert_parity, measured=dict(measured))

    def add_repeated(self, step: int, found: Mapping[str, Any]) -> None:
        """Queue what was found when the updates of a step of this session were made once more (JSON)."""
        assert self._session is not None
        self._write_soon(insert_repeated, step=step, session=self._session, found=dict(found))

    def add_gradients(self, step: int, found: Mapping[str, Any]) -> None:
        """Queue what was found when the trainer's gradients were compared with a plain loop's, after a step and before
        the next one of this session (JSON)."""
        assert self._session is not None
        self._write_soon(insert_gradients, step=step, session=self._session, found=dict(found))

    def trim(self, until: int) -> None:
        """Queue the dropping of the text of rollouts that were made for steps up to `until`."""
        if until > 0:
            self._write_soon(drop_text, until=until)

    def write(self, insert: Callable[..., None], *, pictures: Iterable[Picture] = (), **record: Any) -> None:
        """Queue another write: `insert(connection, **record)`, which names these images."""
        self._put(_Item(write=partial(insert, **record), pictures=tuple(pictures)))

    def flush(self) -> None:
        """Wait until everything queued so far is on disk. Raises `JournalError` if it could not be written."""
        done = threading.Event()
        self._put(_Item(done=done))
        while not done.wait(_POLL_S) and self._writer.is_alive():
            pass
        self._raise_failure()
        assert done.is_set(), "the writer thread ended before it was closed, without a failure"

    def has_step(self, step: int) -> bool:
        """Whether this step, added here, is on disk: also after a failure of a later write."""
        return step in self._steps

    def close(self) -> None:
        """Write all queued items and close the file. Raises `JournalError` if something could not be written.
        Idempotent."""
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
        """Run the writer thread: write all queued items in one transaction, until the last one."""
        last = False
        while not last:
            items = [self._items.get()]
            while not self._items.empty():
                items.append(self._items.get())
            last = any(item.last for item in items)
            self._write([item for item in items if item.write is not None])
            for item in items:
                if item.done is not None:
                    item.done.set()
        with contextlib.suppress(sqlite3.Error):  # nothing is lost with it
            self._connection.executescript("PRAGMA incremental_vacuum")  # `execute` gives back a single page
        self._connection.close()

    def _write(self, items: list[_Item]) -> None:
        if not items:
            return
        if self._failure is not None:
            self._num_unsaved += len(items)
            return
        try:
            self._images.add(picture for item in items for picture in item.pictures)
            self._connection.execute("BEGIN IMMEDIATE")
            for item in items:
                if item.write is not None:
                    item.write(self._connection)
            self._connection.execute("COMMIT")
            self._steps.update(item.step for item in items if item.step is not None)
        except BaseException as failure:  # kept, and raised by every later call
            self._num_unsaved += len(items)
            self._failure = failure
            with contextlib.suppress(sqlite3.Error):  # otherwise SQLite rolls back when the file is next opened
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")


def _open(path: Path, max_bytes: int | None) -> sqlite3.Connection:
    with contextlib.suppress(OSError):  # SQLite would give it a mode of its own, whatever the umask allows
        path.touch(exist_ok=False)
    try:
        # Opened here so that errors are raised at once; afterwards only the writer thread uses it.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise JournalError(f"cannot open the journal {path}: {error}") from error
    try:
        version = _prepare(connection, max_bytes)
    except sqlite3.Error as error:
        connection.close()
        raise JournalError(f"cannot open the journal {path}: {error}") from error
    if version != str(SCHEMA_VERSION):
        connection.close()
        raise JournalError(
            f"the journal {path} has schema version {version}; this version of Sharpen writes {SCHEMA_VERSION}"
        )
    return connection


def _prepare(connection: sqlite3.Connection, max_bytes: int | None) -> str:
    """Configure the connection, create missing tables, and return the schema version of the file."""
    connection.execute(
        "PRAGMA auto_vacuum = INCREMENTAL"
    )  # of a new file; an old one keeps its free pages for new rows
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if max_bytes is not None:
        page_size = connection.execute("PRAGMA page_size").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_size)}")
    connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}")  # at once: else each table is waited for on the disk
    add_ratio_columns(connection)
    connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
    connection.execute("COMMIT")
    return str(connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0])
