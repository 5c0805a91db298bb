"""Thumbs and notes that people give rollouts: `notes.jsonl` beside the run.

In: a rollout's id, a thumb, a text. Out: a line appended to the file; the last line about a rollout counts. The file is
only ever appended to, a line at a time under a lock, so that two people may write it at once:

    {"rollout": "step-3/train/7/2", "source": "run.db", "key": 123, "thumb": "up", "text": "...", "time": 1795384048.9}

`source` and `key` say which rollout of that id is meant (an evaluation's are in `evaluations.db`). An empty thumb and
text take a note back.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from sharpen.files import check_links

NAME = "notes.jsonl"
THUMBS = ("up", "down", "")
MAX_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What somebody thinks of a rollout: a thumb (`up`, `down`, or empty) and a text."""

    rollout: str
    source: str
    key: int
    thumb: str
    text: str
    time: float


def read_notes(run_dir: Path) -> dict[tuple[str, int], Note]:
    """Return the last note on each rollout, by (`run.db` or `evaluations.db`, its key there). Lines that are not whole
    are left out, and so are notes that were taken back."""
    notes: dict[tuple[str, int], Note] = {}
    try:
        lines = (run_dir / NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        if (note := _note(line)) is not None:
            notes[note.source, note.key] = note
    return {place: note for place, note in notes.items() if note.thumb or note.text}


def write_note(run_dir: Path, note: Note) -> None:
    """Append a note. Raises `OSError` where the folder cannot be written, or links lead out of it."""
    check_links(run_dir)
    line = json.dumps(asdict(note), ensure_ascii=True) + "\n"
    with (run_dir / NAME).open("a+b") as file, _locked(file):
        if _is_cut(file):
            line = f"\n{line}"
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def new_note(rollout: str, source: str, key: int, thumb: str, text: str) -> Note:
    """Return a note of now. Raises `ValueError` for a thumb that is none."""
    if thumb not in THUMBS:
        raise ValueError(f"thumb is {thumb!r}: it is up, down or empty")
    text = text.strip().encode("utf-8", "replace").decode()[:MAX_CHARACTERS]
    return Note(rollout=rollout, source=source, key=key, thumb=thumb, text=text, time=round(time.time(), 3))


def _note(line: str) -> Note | None:
    try:
        content: Mapping[str, Any] = json.loads(line)
        return Note(
            rollout=str(content["rollout"]),
            source=str(content["source"]),
            key=int(content["key"]),
            thumb=str(content["thumb"]) if content["thumb"] in THUMBS else "",
            text=str(content["text"]),
            time=float(content["time"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _is_cut(file: IO[bytes]) -> bool:
    """Whether the last line has no end: its writer was killed."""
    file.seek(0, os.SEEK_END)
    if not file.tell():
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


@contextlib.contextmanager
def _locked(file: IO[bytes]) -> Iterator[None]:
    """Hold the file alone, where the file system has locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with contextlib.suppress(OSError):
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
    yield
