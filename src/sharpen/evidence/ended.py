"""What ended a run early: an error or an interrupt, kept as `error` in its `summary.json`.

In: an exception, or the content of a summary. Out: an `Ended`. A run that is killed leaves none; a session that starts
takes the one of the session before away.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sharpen.config.secrets import hide
from sharpen.errors import SharpenError
from sharpen.files import write_whole

_INTERRUPTED = "interrupted, by Ctrl-C or SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An error by its class, its message and, if it is none that Sharpen raises on purpose, its traceback."""

    kind: str
    message: str
    traceback: str | None = None

    @classmethod
    def by(cls, error: BaseException) -> Ended:
        """The record of an exception, without secrets."""
        if isinstance(error, KeyboardInterrupt):
            return cls(kind="KeyboardInterrupt", message=_INTERRUPTED)
        frames = None if isinstance(error, SharpenError) else hide("".join(traceback.format_exception(error)))
        message = "\n".join([*getattr(error, "__notes__", ()), str(error).strip() or type(error).__name__])
        return cls(kind=type(error).__name__, message=hide(message), traceback=frames)

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Ended | None:
        """Read it from the content of `summary.json`; None if there is none."""
        found = summary.get("error")
        if not isinstance(found, Mapping) or not isinstance(found.get("message"), str):
            return None
        frames = found.get("traceback")
        return cls(
            kind=str(found.get("kind", "error")),
            message=found["message"],
            traceback=frames if isinstance(frames, str) else None,
        )

    @property
    def interrupted(self) -> bool:
        """Whether somebody stopped the run, which failed in nothing."""
        return self.kind == "KeyboardInterrupt"

    @property
    def text(self) -> str:
        """The error in words: its class, unless somebody stopped the run, and the message."""
        return self.message if self.interrupted else f"{self.kind}: {self.message}"

    @property
    def line(self) -> str:
        """The first line of `text`."""
        return self.text.splitlines()[0]


def note_ended(run_dir: Path, error: BaseException) -> None:
    """Write into a run's summary what ended it, beside what is there. What cannot be written is left out: the error
    itself is about to be raised."""
    with contextlib.suppress(OSError):
        summary = _read(run_dir / "summary.json")
        _write(run_dir / "summary.json", {"verdict": None, "run_dir": str(run_dir), **summary}, Ended.by(error))


def forget_ended(run_dir: Path) -> None:
    """Take what ended the last session out of a run's summary."""
    summary = _read(run_dir / "summary.json")
    if summary.get("error") is not None:
        _write(run_dir / "summary.json", summary, None)


def read_ended(run_dir: Path) -> Ended | None:
    """Return what ended a run early; None if nothing did, or nothing is recorded."""
    return Ended.of(_read(run_dir / "summary.json"))


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is none, or it is damaged."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, summary: Mapping[str, Any], ended: Ended | None) -> None:
    content = {**summary, "error": None if ended is None else asdict(ended)}
    write_whole(path, f"{json.dumps(content, indent=2, ensure_ascii=False)}\n", lasting=False)
