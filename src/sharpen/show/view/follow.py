"""Tells pages that a run has grown, by server-sent events.

In: a library, the runs to follow. Out: an event for each change: new steps, rollouts, evaluations, notes. A look is a
few `stat`s a second; only after a change is something read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from sharpen.show.view.folders import Folder
from sharpen.show.view.library import Library

POLL_S = 1.0
SILENCE_S = 15.0
"""After so long a comment is sent, so that a connection whose browser is gone is noticed."""
_WATCHED = ("metrics.jsonl", "summary.json", "certificate.json", "run.lock", "notes.jsonl")
_JOURNALS = ("run.db", "run.db-wal", "evaluations.db", "evaluations.db-wal")
Look = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Seen:
    """What was seen of a run: the look of its files, and of its index."""

    look: Look
    indexed: int | None = None
    complete: bool = True


@dataclass(slots=True)
class Follower:
    """Follows the runs of a library: one of them (`key`), with its rollouts, or all, by their files alone."""

    library: Library
    key: str | None = None
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def changes(self) -> list[dict[str, Any]]:
        """Return what has changed since the last call: for each run its last step, its reward, its rollouts. The first
        call returns nothing."""
        first = not self._seen
        folders = self._folders()
        changed = [folder for folder in folders if self._has_changed(folder)]
        if not first and (gone := self._seen.keys() - {folder.key for folder in folders}):
            for key in gone:
                del self._seen[key]
        return [] if first else [self._change(folder) for folder in changed]

    def _folders(self) -> Iterable[Folder]:
        if self.key is None:
            return self.library.folders()
        folder = self.library.folder(self.key)
        return () if folder is None else (folder,)

    def _has_changed(self, folder: Folder) -> bool:
        names = _WATCHED if self.key is None else (*_WATCHED, *_JOURNALS)
        look = (*(_look(folder.path / name) for name in names), (self.library.diagnoses.count, 0))
        seen = self._seen.get(folder.key)
        if seen is None:
            seen = self._seen[folder.key] = _Seen(look)
            return self._index_has_grown(folder, seen) or True
        if seen.look != look:
            seen.look, seen.complete = look, False
            self._index_has_grown(folder, seen)
            return True
        return not seen.complete and self._index_has_grown(folder, seen)

    def _index_has_grown(self, folder: Folder, seen: _Seen) -> bool:
        if self.key is None:
            seen.complete = True
            return False
        state = self.library.index(folder, wait_s=POLL_S).state()
        before, seen.indexed = seen.indexed, state.indexed
        seen.complete = state.complete or bool(state.problems)
        return before != state.indexed

    def _change(self, folder: Folder) -> dict[str, Any]:
        files = self.library.brief(folder)
        rewards = files.values("reward/mean")
        return {
            "run": folder.key,
            "step": max((int(row["step"]) for row in files.rows), default=0),
            "reward": rewards[-1][1] if rewards else None,
            "rollouts": self._seen[folder.key].indexed,
            "complete": self._seen[folder.key].complete,
        }


async def events(
    follower: Follower, ending: Callable[[], bool] = lambda: False, poll_s: float = POLL_S
) -> AsyncIterator[str]:
    """Yield the stream of a follower, until `ending`."""
    yield ": following\n\n"
    silent_s = 0.0
    while not ending():
        changes = await run_in_threadpool(follower.changes)
        for change in changes:
            yield f"event: changed\ndata: {json.dumps(change)}\n\n"
        silent_s = 0.0 if changes else silent_s + poll_s
        if silent_s >= SILENCE_S:
            yield ": still here\n\n"
            silent_s = 0.0
        await asyncio.sleep(poll_s)


def _look(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)
