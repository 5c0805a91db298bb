"""Explored batches in a table of PostgreSQL, for machines that share no folder but can reach a database.

In: contents by number. Out: the rows of one run in the table `sharpen_exchange`, each written in one statement.
"""

from __future__ import annotations

from typing import Any

from sharpen.config.extras import install_command
from sharpen.errors import ConfigError, JournalError

_TABLE = (
    "CREATE TABLE IF NOT EXISTS sharpen_exchange "
    "(run text NOT NULL, number integer NOT NULL, content bytea NOT NULL, PRIMARY KEY (run, number))"
)
_PUT = (
    "INSERT INTO sharpen_exchange (run, number, content) VALUES (%s, %s, %s) "
    "ON CONFLICT (run, number) DO UPDATE SET content = excluded.content"
)


class PostgresStore:
    """Satisfies `exchange.store.Store`. For use by one thread. A connection that is lost raises `JournalError`."""

    def __init__(self, address: str, run: str) -> None:
        """Connect, and create the table if the database has none. Raises as `open_store`."""
        try:
            import psycopg
        except ImportError as error:
            raise ConfigError(
                f"exchange is a PostgreSQL database, but psycopg is not installed: {install_command('postgres')}"
            ) from error
        try:
            self._connection: Any = psycopg.connect(address, autocommit=True)
            self._connection.execute(_TABLE)
        except psycopg.Error as error:
            raise ConfigError(f"cannot use the database of exchange ({_shown(address)}): {error}") from error
        self._run = run

    def put(self, number: int, content: bytes) -> None:
        """See `Store.put`."""
        self._execute(_PUT, (self._run, number, content))

    def get(self, number: int) -> bytes | None:
        """See `Store.get`."""
        row = self._execute(
            "SELECT content FROM sharpen_exchange WHERE run = %s AND number = %s", (self._run, number)
        ).fetchone()
        return None if row is None else bytes(row[0])

    def remove(self, number: int) -> None:
        """See `Store.remove`."""
        self._execute("DELETE FROM sharpen_exchange WHERE run = %s AND number = %s", (self._run, number))

    def numbers(self) -> list[int]:
        """See `Store.numbers`."""
        rows = self._execute(
            "SELECT number FROM sharpen_exchange WHERE run = %s AND number > 0 ORDER BY number", (self._run,)
        )
        return [number for (number,) in rows.fetchall()]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _execute(self, statement: str, values: tuple[Any, ...]) -> Any:
        import psycopg

        try:
            return self._connection.execute(statement, values)
        except psycopg.Error as error:
            raise JournalError(
                f"the database of exchange could not be used: {error}. Start this process again"
            ) from error


def _shown(address: str) -> str:
    """The address without what stands before the host: a name, and perhaps a password."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
