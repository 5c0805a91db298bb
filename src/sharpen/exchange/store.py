"""Where explored batches lie until a trainer takes them: a folder, or a table of PostgreSQL.

In: numbered contents, as bytes. Out: the same bytes, whole or not at all. Number 0 is the explorer's `Announcement`,
number k the batch of step k.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from sharpen.errors import JournalError
from sharpen.files import write_whole

_SUFFIX = ".batch"


class Store(Protocol):
    """Holds contents by number; several processes may use one at the same time."""

    def put(self, number: int, content: bytes) -> None:
        """Store a content, in place of one that is there."""

    def get(self, number: int) -> bytes | None:
        """Return a content; None if there is none."""

    def remove(self, number: int) -> None:
        """Forget a content, if there is one."""

    def numbers(self) -> list[int]:
        """Return the numbers of the batches that are there (not that of the announcement), in ascending order."""

    def close(self) -> None:
        """Let go of what the store holds open."""


class FolderStore:
    """One file for each content, moved into place when it is whole, so that a network file system does, too."""

    def __init__(self, folder: Path) -> None:
        """Create `folder` if it does not exist."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def put(self, number: int, content: bytes) -> None:
        """See `Store.put`."""
        try:
            write_whole(self._file(number), content)
        except OSError as error:
            raise JournalError(f"batch {number} could not be written to {self._folder}: {error}") from error

    def get(self, number: int) -> bytes | None:
        """See `Store.get`."""
        try:
            return self._file(number).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, number: int) -> None:
        """See `Store.remove`."""
        self._file(number).unlink(missing_ok=True)

    def numbers(self) -> list[int]:
        """See `Store.numbers`."""
        return sorted(number for path in self._folder.glob(f"*{_SUFFIX}") if (number := int(path.stem)))

    def close(self) -> None:
        """Nothing is held open."""

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:06d}{_SUFFIX}"


def open_store(exchange: str | None, run_dir: Path, run: str) -> Store:
    """Open the store of a run: by the setting `exchange`, a folder or the address of a PostgreSQL database, where the
    rows of several runs are told apart by `run`; None is a folder in `run_dir`.

    Raises `ConfigError` if the database cannot be reached, or its client is not installed.
    """
    if exchange is not None and exchange.startswith(("postgresql://", "postgres://")):
        from sharpen.exchange.postgres import PostgresStore

        return PostgresStore(exchange, run)
    return FolderStore((run_dir / "exchange" if exchange is None else Path(exchange)) / "batches")
