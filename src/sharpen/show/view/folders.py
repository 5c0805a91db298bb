"""Finds run directories.

In: folders that a person named. Out: a `Folder` for each run directory in them, with a key for URLs that stays the same
as long as the run is at its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MARKS = ("run.db", "metrics.jsonl", "summary.json", "resolved.json", "certificate.json", "evaluations.db")
"""A folder with one of these is a run directory."""
DEPTH = 4
"""How deep runs are looked for: below this are only the parts of a run."""
_PARTS = re.compile(r"global_step_\d+|monitor|trainer_state|\..*")
_UNNAMED = re.compile(r"Experiment-(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)")
_FRESH_S = 300.0
"""A run on another machine is taken to be running if it wrote this recently."""

State = Literal["running", "ended", "failed", "stopped", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A run directory. `key` is its name in URLs; `project` is the folder above it."""

    key: str
    path: Path

    @classmethod
    def of(cls, path: Path) -> Folder:
        """The folder at a path."""
        path = path.resolve()
        name = re.sub(r"[^A-Za-z0-9._]+", "-", path.name).strip("-.") or "run"
        return cls(key=f"{name[:60]}-{path_digest(path)[:6]}", path=path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def title(self) -> str:
        """The run's name; of one that nobody named, when it was made."""
        found = _UNNAMED.fullmatch(self.name)
        if found is None:
            return self.name
        year, month, day, hour, minute, second = found.groups()
        return f"Run of {year}-{month}-{day}, {hour}:{minute}:{second}"

    @property
    def project(self) -> str:
        """The name of the folder that the run is in."""
        return self.path.parent.name

    @property
    def journal(self) -> Path:
        """The rollouts of the training."""
        return self.path / "run.db"

    @property
    def evaluations(self) -> Path:
        """The rollouts of the evaluations."""
        return self.path / "evaluations.db"


def path_digest(path: Path) -> str:
    """A short digest of a path."""
    return hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()


def find_folders(roots: Iterable[Path]) -> tuple[Folder, ...]:
    """Return the run directories at or below these folders, each once, by name. A folder that was named and holds no
    run is returned too, if it holds nothing else either: a run may be about to start there."""
    found: dict[Path, None] = {}
    for root in roots:
        root = root.resolve()
        runs = [*_runs_in(root, DEPTH)]
        found |= dict.fromkeys(runs or ([root] if root.is_dir() and not _entries(root) else []))
    return tuple(Folder.of(path) for path in sorted(found, key=lambda path: (path.parent, path.name)))


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    entries = _entries(folder)
    if any(entry.name in MARKS for entry in entries):
        yield folder
    elif depth:
        for entry in entries:
            if not _PARTS.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield from _runs_in(Path(entry.path), depth - 1)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # not a folder, or not ours to read
        return []


def state_of(folder: Folder, *, ended: bool, failed: bool = False) -> State:
    """Return what a run is doing. `ended` says whether its summary has a verdict, `failed` whether it has an error."""
    if _is_held(folder.path / "run.lock"):
        return "running"
    if failed:
        return "failed"
    if ended:
        return "ended"
    return "stopped" if any((folder.path / mark).exists() for mark in MARKS) else "empty"


def _is_held(lock: Path) -> bool:
    """Whether the process that the lock file names is at work. The lock itself is not tried: a run that starts in that
    moment would find it taken."""
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
        pid, host = int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return time.time() - _last_touched(lock.parent) < _FRESH_S
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _last_touched(path: Path) -> float:
    """Return when a file of the run was last written, in seconds since 1970, which no reader does; 0 if none is there.
    A long step touches them more often than it records a time."""
    times = []
    for name in (*MARKS, "run.db-wal", "evaluations.db-wal"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
