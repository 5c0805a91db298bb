"""Descriptions of errors and of places in the user's code.

In: exceptions and stack frames. Out: text like `KeyError: 'x' (agent.py:12 in run_agent)`.
"""

from __future__ import annotations

import asyncio
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from sharpen.config.secrets import hide

PACKAGE = str(Path(__file__).resolve().parents[2])
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folder names of installed packages, in any environment."""
MAX_CHARACTERS = 300
MAX_FRAMES, MAX_TRACEBACK = 30, 8000
"""Of a traceback: the frames of each error, the innermost ones; and its characters."""
_LITERAL = re.compile(r"""(['"])[^\s'"]{16,}\1""")
"""What may be a key: a long text without a space."""


def is_user_code(filename: str) -> bool:
    """Whether a source file is neither ours nor a library's."""
    if filename.startswith(PACKAGE):
        return False
    if filename.startswith(("<frozen", "<string")) or filename.startswith(LIBRARIES):
        return False
    return INSTALLED.isdisjoint(Path(filename).parts)


def place_of_error(error: BaseException) -> str | None:
    """Return `file:line in function` of the innermost user frame of an error's traceback, else of the innermost frame
    that is not ours; None if all are ours."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _innermost(frames)


def place_of_frame(frame: FrameType | None, *, user_only: bool = False) -> str | None:
    """Like `place_of_error`, for a thread's stack. With `user_only`, None if it has no user frame."""
    frames: list[tuple[CodeType, int]] = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    frames.reverse()
    if user_only:
        frames = [pair for pair in frames if is_user_code(pair[0].co_filename)]
    return _innermost(frames)


def imported_by(frame: FrameType | None) -> str | None:
    """Return the module that a thread is importing now, the outermost if imports are nested; None if there is none."""
    module = None
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" and frame.f_code.co_name == "_find_and_load":
            module = str(frame.f_locals.get("name"))
        frame = frame.f_back
    return module


def place_of_task(task: asyncio.Task[Any] | None, *, user_only: bool = False) -> str | None:
    """Like `place_of_frame`, for the place where a suspended task waits."""
    frames: list[tuple[CodeType, int]] = []
    waiting: Any = task.get_coro() if task is not None else None
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        frames.append((frame.f_code, frame.f_lineno))
        waiting = waiting.cr_await
    if user_only:
        frames = [pair for pair in frames if is_user_code(pair[0].co_filename)]
    return _innermost(frames)


def describe(error: BaseException) -> str:
    """Return an error's type, message and place in one line; secrets are hidden."""
    try:
        message = str(error)
    except Exception as second:  # the message is made by the user's code
        message = f"its message cannot be read: __str__ raised {type(second).__name__}"
    message = stored_text(" ".join(hide(message[: 100 * MAX_CHARACTERS]).split()))
    if len(message) > MAX_CHARACTERS:
        message = message[: MAX_CHARACTERS - 3] + "..."
    place = place_of_error(error)
    return type(error).__name__ + (f": {message}" if message else "") + (f" ({place})" if place else "")


def short_repr(value: Any) -> str:
    """Return the beginning of a value's `repr`, without secrets, and its type."""
    kind = type(value).__name__
    try:
        text = repr(value)
    except Exception as error:  # made by the user's code
        return f"an object of type {kind}, whose __repr__ raised {type(error).__name__}"
    text = " ".join(hide(text[: 100 * MAX_CHARACTERS]).split())
    return f"{stored_text(text[:80])} ({kind})"


def stored_text(text: str) -> str:
    """Return a text that files and databases take: half characters, which UTF-8 lacks, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def traceback_of(error: BaseException) -> str | None:
    """Return the traceback of an error and of its causes, without the frames that are ours and without what may be a
    key in a line of code; None if all frames are ours, or it cannot be read. A long one lacks its middle."""
    try:
        found = traceback.TracebackException.from_exception(error, limit=-MAX_FRAMES, compact=True)
        if not _take_out_ours(found):
            return None
        text = hide(stored_text("".join(found.format()).rstrip()))
    except Exception:  # the user's classes of errors, or thousands of causes: the failure is described without it
        return None
    if (left_out := len(text) - MAX_TRACEBACK) <= 0:
        return text
    head = MAX_TRACEBACK // 4
    return f"{text[:head]}\n[... {left_out:,} characters ...]\n{text[head + left_out :]}"


def _take_out_ours(found: traceback.TracebackException) -> bool:
    """Take our frames out of a traceback, and return whether any is left."""
    kept = [frame for frame in found.stack if not frame.filename.startswith(PACKAGE)]
    found.stack[:] = [
        traceback.FrameSummary(
            _short(frame.filename),
            frame.lineno,
            frame.name,
            lookup_line=False,
            line=_LITERAL.sub(r"\1...\1", frame.line or ""),
        )
        for frame in kept
    ]
    others = [one for one in (found.__cause__, found.__context__, *(found.exceptions or ())) if one is not None]
    return any([bool(kept), *map(_take_out_ours, others)])


def causes(error: BaseException, *, implicit: bool = False) -> Iterator[BaseException]:
    """Yield the error, the errors it was raised `from`, and the members of exception groups.

    With `implicit`, also errors that were being handled when another was raised, as a traceback shows them.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        cause = error.__cause__
        if cause is None and implicit and not error.__suppress_context__:
            cause = error.__context__
        if cause is not None:
            waiting.append(cause)
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(reversed(error.exceptions))


def _innermost(frames: list[tuple[CodeType, int]]) -> str | None:
    """Return the place of the last user frame (outermost first), else of the last frame that is not ours."""
    users = [frame for frame in frames if is_user_code(frame[0].co_filename)]
    foreign = [frame for frame in frames if not frame[0].co_filename.startswith(PACKAGE)]
    if not (users or foreign):
        return None
    code, line = (users or foreign)[-1]
    return f"{_short(code.co_filename)}:{line} in {code.co_name}"


def _short(filename: str) -> str:
    """Return the path relative to the working folder if it is below that, else unchanged."""
    path = Path(filename)
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # user code changed into a folder that was then deleted
        return filename
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else filename
