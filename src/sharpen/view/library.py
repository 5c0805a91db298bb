"""The runs on view: their folders, and their files as they are now.

In: the folders that a person named. Out: `RunFiles` by key, read again only when the files have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from sharpen.view.files import RunFiles, read_files
from sharpen.view.folders import Folder, find_folders

_READ = ("metrics.jsonl", "summary.json", "certificate.json", "resolved.json", "run.db")
Stamp = tuple[tuple[int, int] | None, ...]


class Library:
    """The runs below `roots`. Thread-safe."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[Stamp, RunFiles]] = {}

    def folders(self) -> tuple[Folder, ...]:
        """Return the run directories, also those that appeared meanwhile."""
        return find_folders(self.roots)

    def folder(self, key: str) -> Folder | None:
        """Return the run with a key."""
        return next((folder for folder in self.folders() if folder.key == key), None)

    def files(self, folder: Folder) -> RunFiles:
        """Return a run's files."""
        now = stamp(folder.path)
        with self._lock:
            known = self._files.get(folder.path)
        if known is not None and known[0] == now:
            return known[1]
        files = read_files(folder.path)
        with self._lock:
            self._files[folder.path] = (now, files)
        return files


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
