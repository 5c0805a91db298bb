"""Opens a journal (`run.db`) for reading, also while a run is writing it, and one that somebody else made.

In: its path. Out: a connection that writes nothing beside the file and computes nothing that the file asks for.
"""

from __future__ import annotations

import atexit
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

from sharpen.errors import JournalError, SharpenError
from sharpen.learning.experience.images import FOLDER
from sharpen.learning.experience.records import SCHEMA, SCHEMA_VERSION

_AT_REST = "mode=ro&immutable=1"
_SHARED = "mode=ro&readonly_shm=1"
"""How SQLite opens a journal without writing: as a file at rest, or by the log and shared memory that are there."""
_TABLES = {*re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", SCHEMA), "images", "recorded", "answers", "trimmed"}
"""The names of tables that a journal may have."""
_MAY_COMPUTE = re.compile(r"(?<![a-z_])as(?![a-z0-9_])", re.IGNORECASE)
"""The word without which no column is computed. Where it is missing, the columns need not be asked for."""
DAMAGE = (sqlite3.Error, ArithmeticError, AssertionError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of values that are not what they should be."""


def has(connection: sqlite3.Connection, table: str) -> bool:
    """Whether the journal has this table; older journals lack some."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone() is not None


@contextmanager
def reading(path: Path | str) -> Iterator[sqlite3.Connection]:
    """Open a journal for reading it in a block. Raises `JournalError` as `open_journal` does, and for records that no
    version of Sharpen has written; also if a run has come back to a journal at rest and written into it meanwhile."""
    before = None if _log_of(Path(path)).exists() else _look(Path(path))
    with closing(open_journal(path)) as connection:
        try:
            yield connection
            if before is not None and before != _look(Path(path)):
                raise JournalError(f"the journal {path} was written while it was read: read it again")
        except SharpenError:
            raise
        except sqlite3.OperationalError as error:  # a lock, the disk
            raise JournalError(f"cannot read the journal {path}: {error}") from error
        except DAMAGE as error:
            raise JournalError(f"the journal {path} is damaged: {type(error).__name__}: {error}") from error


def open_journal(path: Path | str) -> sqlite3.Connection:
    """Open a journal for reading; neither SQLite nor we write a file beside it. Raises `JournalError` if the file is
    not a journal or has another schema version."""
    try:
        connection, row = _opened(Path(path))
    except sqlite3.Error as error:
        raise JournalError(f"cannot read the journal {path}: {error}") from error
    if row is None or row["value"] != str(SCHEMA_VERSION):
        connection.close()
        version = "no schema version" if row is None else f"schema version {row['value']}"
        raise JournalError(f"the journal {path} has {version}; this version of Sharpen reads {SCHEMA_VERSION}")
    return connection


def _opened(path: Path) -> tuple[sqlite3.Connection, sqlite3.Row | None]:
    """Open a journal and read its schema version. Where a run is writing, or was killed, SQLite's log and its shared
    memory are beside it, and are read as they are; of a log alone a copy is read; without a log it is at rest."""
    if _log_of(path).exists() and _beside(path, "shm").exists():
        try:
            return _connected(path, _SHARED)
        except sqlite3.OperationalError as error:  # not ours to open, or gone: the run has just ended
            if not path.is_file() or error.sqlite_errorcode & 0xFF not in (
                sqlite3.SQLITE_CANTOPEN,
                sqlite3.SQLITE_READONLY,
            ):
                raise
    log = _log_of(path)
    if log.exists() and log.stat().st_size:
        path = _merged_copy(path, path.stat().st_mtime_ns, log.stat().st_mtime_ns)
    return _connected(path, _AT_REST)


def _look(path: Path) -> tuple[int, int] | None:
    """Return what tells whether a file has been written meanwhile; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _log_of(path: Path) -> Path:
    """Return the file of the records that SQLite has not moved into the journal yet."""
    return _beside(path, "wal")


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}-{ending}")


@cache
def _merged_copy(path: Path, *_changed: int) -> Path:
    """Return a copy of a journal with the records of its log, in a folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="sharpen-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder) / path.name
    for source, target in ((path, copy), (_log_of(path), _log_of(copy))):
        shutil.copyfile(source, target)
    (copy.parent / FOLDER).symlink_to(path.resolve().parent / FOLDER)
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return copy


def _connected(path: Path, options: str) -> tuple[sqlite3.Connection, sqlite3.Row | None]:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?{options}", uri=True)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        _refuse_code(connection, path)
        return connection, connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    except (sqlite3.Error, JournalError):
        connection.close()
        raise


def _refuse_code(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `JournalError` if a database computes something when the tables of a journal are read or written. Views and
    tables of the user's own are read by nobody."""
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        ours = name.lower() in _TABLES
        if kind == "table" and (sql or "").startswith("CREATE TABLE "):
            asked = ours and _MAY_COMPUTE.search(sql)
            columns = connection.execute(f'PRAGMA table_xinfo("{name}")') if asked else ()
            for column in (column["name"] for column in columns if column["hidden"]):
                raise _computing(path, f"the column {column!r} of {name!r}", f"ALTER TABLE {name} DROP COLUMN {column}")
        elif kind == "table":
            raise _computing(path, f"the virtual table {name!r}", f"DROP TABLE {name}")
        elif kind == "trigger" or (kind == "view" and ours):
            raise _computing(path, f"the {kind} {name!r}", f"DROP {kind.upper()} {name}")


def _computing(path: Path, what: str, remedy: str) -> JournalError:
    return JournalError(
        f"{path} has {what}, which computes something when it is read or written: no run makes one. If it is yours, "
        f"remove it: {remedy}"
    )
