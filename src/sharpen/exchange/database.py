"""The exchange in a PostgreSQL database, for machines that share no folder.

In: contents by name. Out: the rows of one run in the table `sharpen_contents`. A content is stored in parts, since a
value has at most a gigabyte and weights may have many; all parts of it appear in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sharpen.config.extras import install_command
from sharpen.errors import ConfigError, JournalError

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

PART_BYTES = 8 << 20
VERSIONS = "sharpen_schema"
"""The table in which alembic notes the schema's version."""
_MIGRATIONS = Path(__file__).parent / "migrations"
_LOCK = 7_413_905_122
"""The advisory lock under which tables are made: explorer and trainer may begin at the same moment."""


class DatabaseStore:
    """Satisfies `exchange.store.Store`. A connection that was lost is made anew at the next use."""

    def __init__(self, address: str, run: str) -> None:
        """Connect, and make the tables or bring them to this version. Raises as `open_store`."""
        try:
            import alembic  # noqa: F401
            import psycopg  # noqa: F401
            import sqlalchemy
        except ImportError as error:
            raise ConfigError(
                f"exchange is a PostgreSQL database, but {error.name} is not installed: {install_command('postgres')}"
            ) from error
        url = _url(address)
        self._run, self.where, self._closed = run, url.render_as_string(hide_password=True), False
        self._engine = sqlalchemy.create_engine(url, pool_pre_ping=True, pool_size=1, hide_parameters=True)
        try:
            upgrade(self._engine)
        except (sqlalchemy.exc.SQLAlchemyError, ConfigError) as error:
            self._engine.dispose()
            raise ConfigError(f"cannot use the database of exchange ({self.where}): {_reason(error)}") from error

    def put(self, name: str, content: bytes) -> None:
        """See `Store.put`."""
        with self._using(f"{name} could not be stored") as connection:
            _run(connection, "DELETE FROM sharpen_contents WHERE run = :run AND name = :name", self._run, name)
            for part in range(max(1, -(-len(content) // PART_BYTES))):
                _run(
                    connection,
                    "INSERT INTO sharpen_contents (run, name, part, content) VALUES (:run, :name, :part, :content)",
                    self._run,
                    name,
                    part=part,
                    content=content[part * PART_BYTES : (part + 1) * PART_BYTES],
                )

    def get(self, name: str) -> bytes | None:
        """See `Store.get`."""
        with self._using(f"{name} could not be read") as connection:
            parts = list(self._parts(connection, name))
        return b"".join(parts) if parts else None

    @contextmanager
    def file(self, name: str) -> Iterator[Path | None]:
        """See `Store.file`."""
        with TemporaryDirectory(prefix="sharpen-exchange-") as folder:
            path, num_parts = Path(folder) / "content", 0
            with self._using(f"{name} could not be read") as connection, path.open("wb") as file:
                for part in self._parts(connection, name):
                    file.write(part)
                    num_parts += 1
            yield path if num_parts else None

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        with self._using(f"{name} could not be removed") as connection:
            _run(connection, "DELETE FROM sharpen_contents WHERE run = :run AND name = :name", self._run, name)

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

    def _parts(self, connection: Connection, name: str) -> Iterator[bytes]:
        """Yield the parts of a content, one at a time, as they were when the first was asked for."""
        rows = _run(
            connection.execution_options(stream_results=True, max_row_buffer=1),
            "SELECT content FROM sharpen_contents WHERE run = :run AND name = :name ORDER BY part",
            self._run,
            name,
        )
        return (bytes(content) for (content,) in rows)

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


def _url(address: str) -> URL:
    """Read an address as libpq and psql have it; the driver is ours. Raises `ConfigError`, without the address, which
    may hold a password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(address).set(drivername="postgresql+psycopg")
    except (ArgumentError, ValueError):
        raise ConfigError(
            "exchange is not an address of a database, as postgresql://user:password@host:5432/database"
        ) from None


def _run(connection: Connection, statement: str, run: str, name: str, **values: object) -> Iterator[tuple[Any, ...]]:
    from sqlalchemy import text

    result = connection.execute(text(statement), {"run": run, "name": name, **values})
    return (tuple(row) for row in result) if result.returns_rows else iter(())


def _reason(error: Exception) -> str:
    """Return the first lines of what the server said, without what SQLAlchemy adds to it."""
    return str(getattr(error, "orig", None) or error).strip()
