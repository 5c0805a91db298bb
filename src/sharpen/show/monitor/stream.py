"""Output streams that may close during a run: a terminal is closed, the reader of a pipe ends.

In: text. Out: the same text, as long as someone reads it; the run itself never depends on that. A rollout whose code
writes without end is cut off.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO, cast
from weakref import WeakKeyDictionary

MAX_WRITTEN = 1_000_000
"""Characters that one rollout may write to one of the streams."""


class Writer(Protocol):
    """Someone who writes."""

    @property
    def label(self) -> str: ...


WhoWrites = Callable[[], Writer | None]
"""Returns the rollout whose code runs, or None."""


def open_missing_streams() -> None:
    """Give a process that was started without standard streams (a service, `>&-`) the null device in their place. A
    file of ours must not get their descriptors, to which others write: the interpreter, libraries, child processes."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (as long as the process)


@contextlib.contextmanager
def lasting_output(who_writes: WhoWrites) -> Iterator[None]:
    """Keep this process, including a user's workflow, from failing when the reader of its output goes away, and what
    each rollout writes within bounds."""
    out, err = (cast(TextIO, LastingStream(stream, who_writes)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class LastingStream:
    """Writes to `stream` until that fails, and then discards everything. Characters that its encoding lacks are
    escaped.

    After a failure the stream's descriptor points to the null device, so that other writers (including the interpreter
    at exit) do not fail either.
    """

    def __init__(self, stream: TextIO, who_writes: WhoWrites | None = None) -> None:
        self._stream = stream
        self._who_writes = who_writes
        self._written: WeakKeyDictionary[Writer, int] = WeakKeyDictionary()
        self._gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or give up the stream."""
        length = len(text)
        if self._who_writes is not None and (writer := self._who_writes()) is not None:
            text = self._bounded(text, writer)
        if text and not self._gone:
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError as error:
                    self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            except (OSError, ValueError):  # closed by the other side; closed by us
                self._give_up()
        return length

    def _bounded(self, text: str, writer: Writer) -> str:
        """Return what of the text a rollout may still write, with a remark where it is cut off."""
        before = self._written.get(writer, 0)
        self._written[writer] = before + len(text)
        if before + len(text) <= MAX_WRITTEN:
            return text
        if before > MAX_WRITTEN:
            return ""
        remark = f"\n[rollout {writer.label} wrote more than {MAX_WRITTEN:,} characters: the rest is left out]\n"
        return text[: MAX_WRITTEN - before] + remark

    def flush(self) -> None:
        """Flush the stream, or give it up."""
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def _give_up(self) -> None:
        self._gone = True
        with contextlib.suppress(OSError, ValueError):  # no descriptor of its own, as in a notebook
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)
