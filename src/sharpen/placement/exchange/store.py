"""Where explorer and trainer leave things for each other: a folder, or a database.

In: contents by name, as bytes. Out: the same bytes, whole or not at all.

    batches/000000.batch              what the explorer says of itself before its first batch (`Announcement`)
    batches/<step>.batch              the rollouts of a step
    trainer.json                      how far the trainer is, and which weights an explorer may use
    weights/<session>-<version>.safetensors
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from sharpen.errors import JournalError
from sharpen.files import flush_folder, partial_files, partial_of, write_whole

_FOLDER, _SUFFIX = "batches", ".batch"
EXPLORER = "explore"
"""The explorer's folder in a run's."""
LEFT_S = 600.0
"""What has not been written to for so long is of a process that was killed."""
SCHEMES = ("postgresql://", "postgres://")
"""How the address of a database begins."""


class Store(Protocol):
    """Holds contents by name (`folder/file`); several processes may use one at the same time, each by one thread."""

    @property
    def where(self) -> str:
        """Where it is, for people: a folder, or an address without its password."""

    def put(self, name: str, content: bytes) -> None:
        """Store a content, in place of one that is there. Raises `JournalError`."""

    def put_new(self, name: str, content: bytes) -> bool:
        """Store a content unless there is one: of several that do so at the same time one gets True. Raises
        `JournalError`."""

    def get(self, name: str) -> bytes | None:
        """Return a content; None if there is none."""

    def file(self, name: str) -> AbstractContextManager[Path | None]:
        """Return a context that yields a file with a content, of which the memory need not hold all; None if there is
        none."""

    def remove(self, name: str) -> None:
        """Forget a content, if there is one."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""

    def close(self) -> None:
        """Let go of what the store holds open."""


class FolderStore:
    """One file for each content, moved into place when it is whole, so that a network file system does, too."""

    def __init__(
        self, folder: Path, *, link: Callable[[Path, Path], None] = os.link, flush: Callable[[int], None] = os.fsync
    ) -> None:
        """Create `folder` if it does not exist. `link` gives a file a further name, and `flush` puts what a descriptor
        of a file or of a folder stands for on disk."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._link, self._flush = folder, link, flush
        self._swept: set[Path] = set()

    @property
    def where(self) -> str:
        """See `Store.where`."""
        return str(self._folder)

    def put(self, name: str, content: bytes) -> None:
        """See `Store.put`."""
        with self._place(name) as path:
            write_whole(path, content, flush=self._flush)

    def put_new(self, name: str, content: bytes) -> bool:
        """See `Store.put_new`. The file system must have hard links. NFS repeats a request whose reply was lost, and
        then says that the name is taken, by the file that it was given to."""
        with self._place(name) as path:
            if path.exists():
                return False
            own = partial_of(path)
            try:
                write_whole(own, content, flush=self._flush)
                stored = self._made_link(own, path)
            finally:
                own.unlink(missing_ok=True)
            if stored:
                flush_folder(path.parent, self._flush)
            return stored

    def get(self, name: str) -> bytes | None:
        """See `Store.get`."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    @contextmanager
    def file(self, name: str) -> Iterator[Path | None]:
        """See `Store.file`."""
        path = self._folder / name
        yield path if path.exists() else None

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        (self._folder / name).unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        """See `Store.names`."""
        return sorted(f"{folder}/{path.name}" for path in (self._folder / folder).glob("[!.]*"))

    def close(self) -> None:
        """Nothing is held open."""

    def _made_link(self, own: Path, path: Path) -> bool:
        try:
            self._link(own, path)
        except FileExistsError:
            with suppress(FileNotFoundError):  # removed meanwhile
                return path.samefile(own)
            return False
        return True

    @contextmanager
    def _place(self, name: str) -> Iterator[Path]:
        """Yield where a content is written. Raises `JournalError`. Before the first, what killed processes left in its
        folder is removed; another process may be writing there, but not for as long as `LEFT_S`."""
        path = self._folder / name
        try:
            if path.parent != self._folder:
                path.parent.mkdir(exist_ok=True)
                flush_folder(self._folder, self._flush)
            if path.parent not in self._swept:
                for leftover in partial_files(path.parent):
                    with suppress(FileNotFoundError):
                        if time.time() - leftover.stat().st_mtime > LEFT_S:
                            leftover.unlink()
                self._swept.add(path.parent)
            yield path
        except OSError as error:
            raise JournalError(f"{name} could not be written to {self._folder}: {error}") from error


class Batches:
    """The batches of a store, by their steps. Number 0 is the explorer's `Announcement`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, number: int, content: bytes) -> None:
        """Store a batch, in place of one that is there."""
        self._store.put(_name(number), content)

    def put_new(self, number: int, content: bytes) -> bool:
        """Store a batch unless one is there; whether it was stored."""
        return self._store.put_new(_name(number), content)

    def get(self, number: int) -> bytes | None:
        """Return a batch; None if there is none."""
        return self._store.get(_name(number))

    def remove(self, number: int) -> None:
        """Forget a batch, if there is one."""
        self._store.remove(_name(number))

    def numbers(self) -> list[int]:
        """Return the numbers of the batches that are there (not that of the announcement), in ascending order."""
        names = (Path(name) for name in self._store.names(_FOLDER))
        return sorted(number for name in names if name.suffix == _SUFFIX and (number := int(name.stem)))


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:06d}{_SUFFIX}"


def open_store(exchange: str | None, run_dir: Path, run: str) -> Store:
    """Open the store of a run: by the setting `exchange`, a folder or the address of a PostgreSQL database, where the
    contents of several runs are told apart by `run`; None is a folder in `run_dir`.

    Raises `ConfigError` if the database cannot be used, or its client is not installed.
    """
    if exchange is not None and exchange.startswith(SCHEMES):
        from sharpen.placement.exchange.database import DatabaseStore

        return DatabaseStore(exchange, run, run_dir / EXPLORER)
    return FolderStore(run_dir / "exchange" if exchange is None else Path(exchange))
