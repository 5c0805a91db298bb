"""The runs on view: their folders, their files as they are now, and their indexes.

In: the folders that a person named. Out: `RunFiles` by key, read again only when the files have changed; an `Index`,
brought up to date by a thread of its own, a few groups at a time, the run that was last asked for first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from sharpen.show.view.diagnoses import Diagnoses
from sharpen.show.view.files import RunFiles, read_brief, read_files
from sharpen.show.view.folders import Folder, find_folders
from sharpen.show.view.index import Index, reason

_READ = ("metrics.jsonl", "summary.json", "certificate.json", "resolved.json", "run.db")
Stamp = tuple[tuple[int, int] | None, ...]
Known = dict[Path, tuple[Stamp, RunFiles]]
"""Files that were read, with what their directory looked like."""


class Library:
    """The runs below `roots`. Thread-safe. Call `close`.

    `cache` is where the indexes are kept (by default `default_cache()`); where it cannot be written, they are kept in a
    temporary folder until `close`.
    """

    def __init__(self, roots: Sequence[Path], cache: Path | None = None) -> None:
        self.roots = tuple(roots)
        self.diagnoses = Diagnoses()
        self._lock = threading.Lock()
        self._files: Known = {}
        self._briefs: Known = {}
        self._indexes: dict[str, Index] = {}
        self._cache, self._temporary = _usable(cache or default_cache())
        self._wanted: list[Index] = []
        self._changed = threading.Condition(self._lock)
        self._worker: threading.Thread | None = None
        self._closed = False

    def folders(self) -> tuple[Folder, ...]:
        """Return the run directories, also those that appeared meanwhile."""
        return find_folders(self.roots)

    def folder(self, key: str) -> Folder | None:
        """Return the run with a key."""
        with self._lock:
            known = self._indexes.get(key)
        if known is not None:
            return known.folder
        return next((folder for folder in self.folders() if folder.key == key), None)

    def files(self, folder: Folder) -> RunFiles:
        """Return a run's files."""
        return self._read(self._files, folder, read_files)

    def brief(self, folder: Folder) -> RunFiles:
        """Return what the table of runs shows of a run's files."""
        return self._read(self._briefs, folder, read_brief)

    def _read(self, known: Known, folder: Folder, read: Callable[[Path], RunFiles]) -> RunFiles:
        now = stamp(folder.path)
        with self._lock:
            before = known.get(folder.path)
        if before is not None and before[0] == now:
            return before[1]
        files = read(folder.path)
        with self._lock:
            known[folder.path] = (now, files)
        return files

    def index(self, folder: Folder, *, wait_s: float = 0.0) -> Index:
        """Return a run's index, and have it brought up to date; wait so long for that at most."""
        with self._changed:
            index = self._indexes.get(folder.key)
            if index is None:
                index = self._indexes[folder.key] = Index(folder, self._cache)
            if index in self._wanted:
                self._wanted.remove(index)
            self._wanted.append(index)
            if self._worker is None and not self._closed:
                self._worker = threading.Thread(target=self._work, name="sharpen-view-index", daemon=True)
                self._worker.start()
            self._changed.notify_all()
            if wait_s:
                self._changed.wait_for(lambda: index not in self._wanted or self._closed, wait_s)
        return index

    def close(self) -> None:
        """Stop updating."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()
        if self._temporary:
            shutil.rmtree(self._cache, ignore_errors=True)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                index = self._wanted[-1]
            try:
                more, problem = index.update(), ""
            except Exception as error:  # whatever a damaged record leads to: other runs' indexes go on
                more, problem = False, reason(error)
            with self._changed:
                index.problem = problem
                if not more and index in self._wanted:
                    self._wanted.remove(index)
                self._changed.notify_all()


def default_cache() -> Path:
    """Return the folder of the indexes in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sharpen" / "view"


def _usable(cache: Path) -> tuple[Path, bool]:
    """Return a folder that can be written, and whether it is temporary. Indexes of runs that are gone are removed from
    the lasting one."""
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        (cache / ".writable").touch()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="sharpen-view-")), True
    for note in cache.glob("*/path"):
        if not Path(note.read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n")).is_dir():
            shutil.rmtree(note.parent, ignore_errors=True)
    return cache, False


def stamp(path: Path) -> Stamp:
    """What tells whether a run's files have changed: their times and sizes."""
    stamps: list[tuple[int, int] | None] = []
    for name in _READ:
        try:
            found = (path / name).stat()
            # Of run.db only whether it is there: its rollouts are read through the index.
            stamps.append((0, 0) if name == "run.db" else (found.st_mtime_ns, found.st_size))
        except OSError:
            stamps.append(None)
    return tuple(stamps)
