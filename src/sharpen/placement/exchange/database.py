"""The exchange in a PostgreSQL database, for machines that share no folder.

In: contents by name. Out: the rows of one run in the table `sharpen_contents`. A content is stored in parts, since a
value has at most a gigabyte and weights may have many; all parts of it appear in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.config.extras import install_command
from sharpen.config.secrets import hide_in_value
from sharpen.errors import ConfigError, JournalError

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, CursorResult, Engine

PART_BYTES = 8 << 20
VERSIONS = "sharpen_schema"
"""The table in which alembic notes the schema's version."""
_MIGRATIONS = Path(__file__).parent / "migrations"
_SPOOL = ".exchange.partial"
"""The file that holds a content while it is read."""
_LOCK = 7_413_905_122
"""The advisory lock under which tables are made: explorer and trainer may begin at the same moment."""


class DatabaseStore:
    """Satisfies `exchange.store.Store`. A connection that was lost is made anew at the next use."""

    def __init__(self, address: str, run: str, folder: Path) -> None:
        """Connect, and make the tables or bring them to this version. Contents that are read as files lie in `folder`
        meanwhile, that of the run's one reader. Raises as `open_store`."""
        try:
            import alembic  # noqa: F401
            import psycopg  # noqa: F401
            import sqlalchemy
        except ImportError as error:
            raise ConfigError(
                f"exchange is a PostgreSQL database, but {error.name} is not installed: {install_command('postgres')}"
            ) from error
        url, arguments = _read_address(address)
        self._run, self._spool, self._closed = run, folder / _SPOOL, False
        self.where = hide_in_value(address) if arguments else url.render_as_string(hide_password=True)
        self._engine = sqlalchemy.create_engine(
            url, connect_args=arguments, pool_pre_ping=True, pool_size=1, hide_parameters=True
        )
        try:
            upgrade(self._engine)
        except (sqlalchemy.exc.SQLAlchemyError, ConfigError) as error:
            self._engine.dispose()
            raise ConfigError(f"cannot use the database of exchange ({self.where}): {_reason(error)}") from error

    def put(self, name: str, content: bytes) -> None:
        """See `Store.put`."""
        with self._using(f"{name} could not be stored") as connection:
            self._delete(connection, name)
            while not self._insert(connection, name, content):  # another process has just stored one
                self._delete(connection, name)

    def put_new(self, name: str, content: bytes) -> bool:
        """See `Store.put_new`."""
        with self._using(f"{name} could not be stored") as connection:
            return self._insert(connection, name, content)

    def get(self, name: str) -> bytes | None:
        """See `Store.get`."""
        with self._using(f"{name} could not be read") as connection, self._parts(connection, name) as found:
            parts = list(found)
        return b"".join(parts) if parts else None

    @contextmanager
    def file(self, name: str) -> Iterator[Path | None]:
        """See `Store.file`."""
        failed = f"{name} could not be read"
        try:
            with self._using(failed) as connection, self._parts(connection, name) as parts:
                found = self._write(parts, failed)
            yield self._spool if found else None
        finally:
            with suppress(OSError):
                self._spool.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        with self._using(f"{name} could not be removed") as connection:
            self._delete(connection, name)

    def names(self, folder: str) -> list[str]:
        """See `Store.names`."""
        with self._using(f"{folder} could not be listed") as connection:
            rows = _run(
                connection,
                "SELECT name FROM sharpen_contents WHERE run = :run AND starts_with(name, :name) AND part = 0",
                self._run,
                f"{folder}/",
            )
            return sorted(name for (name,) in rows)

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        self._engine.dispose()

    def _delete(self, connection: Connection, name: str) -> None:
        _run(connection, "DELETE FROM sharpen_contents WHERE run = :run AND name = :name", self._run, name)

    def _insert(self, connection: Connection, name: str, content: bytes) -> bool:
        """Store a content unless there is one, waiting for another process that is about to; whether it was stored."""
        for part in range(max(1, -(-len(content) // PART_BYTES))):
            done = _execute(
                connection,
                "INSERT INTO sharpen_contents (run, name, part, content) VALUES (:run, :name, :part, :content) "
                "ON CONFLICT DO NOTHING",
                self._run,
                name,
                part=part,
                content=content[part * PART_BYTES : (part + 1) * PART_BYTES],
            )
            if done.rowcount == 0:  # only of the first part
                return False
        return True

    def _write(self, parts: Iterator[bytes], failed: str) -> bool:
        """Write the parts of a content into a file, and return whether there were any. Raises `JournalError`."""
        num_parts = 0
        try:
            self._spool.parent.mkdir(parents=True, exist_ok=True)
            with self._spool.open("wb") as file:
                for part in parts:
                    file.write(part)
                    num_parts += 1
        except OSError as error:
            raise JournalError(
                f"{failed}: it needs a file in {self._spool.parent}, which could not be written ({error.strerror}). "
                "Make room there, and start this process again"
            ) from error
        return num_parts > 0

    @contextmanager
    def _parts(self, connection: Connection, name: str) -> Iterator[Iterator[bytes]]:
        """Yield the parts of a content, which come one at a time, as they were when the first was asked for."""
        with _execute(
            connection.execution_options(stream_results=True, max_row_buffer=1),
            "SELECT content FROM sharpen_contents WHERE run = :run AND name = :name ORDER BY part",
            self._run,
            name,
        ) as rows:
            yield (bytes(content) for (content,) in rows)

    @contextmanager
    def _using(self, failed: str) -> Iterator[Connection]:
        """Use a connection in a transaction. Raises `JournalError`."""
        from sqlalchemy.exc import SQLAlchemyError

        if self._closed:
            raise JournalError(f"{failed}: the database of exchange ({self.where}) was closed")
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise JournalError(
                f"{failed}: the database of exchange ({self.where}) could not be used: {_reason(error)}. Start this "
                "process again when it can be reached"
            ) from error


def upgrade(engine: Engine, to: str = "head") -> None:
    """Make the tables, or bring those of an earlier Sharpen to this version. Raises `ConfigError` for tables of a later
    one."""
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError
    from sqlalchemy import text

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, to)
        except CommandError as error:
            raise ConfigError(
                f"its tables are those of a later Sharpen ({error}): run explorer and trainer with the same version"
            ) from error


def _read_address(address: str) -> tuple[URL, dict[str, Any]]:
    """Read an address as libpq and psql have it; the driver is ours. Returns the URL, and what to connect to if only
    libpq can read it: several hosts with ports. Raises `ConfigError`, without the address, which may hold a
    password."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict
    from sqlalchemy.engine import URL, make_url
    from sqlalchemy.exc import ArgumentError

    with suppress(ArgumentError, ValueError):
        return make_url(address).set(drivername="postgresql+psycopg"), {}
    try:
        return URL.create("postgresql+psycopg"), conninfo_to_dict(address)
    except ProgrammingError:
        raise ConfigError(
            "exchange is not an address of a database, as postgresql://user:password@host:5432/database"
        ) from None


def _run(connection: Connection, statement: str, run: str, name: str, **values: object) -> Iterator[tuple[Any, ...]]:
    result = _execute(connection, statement, run, name, **values)
    return (tuple(row) for row in result) if result.returns_rows else iter(())


def _execute(connection: Connection, statement: str, run: str, name: str, **values: object) -> CursorResult[Any]:
    from sqlalchemy import text

    return connection.execute(text(statement), {"run": run, "name": name, **values})


def _reason(error: Exception) -> str:
    """Return the first lines of what the server said, without what SQLAlchemy adds to it."""
    return str(getattr(error, "orig", None) or error).strip()
