"""Output streams that may close during a run: a terminal is closed, the reader of a pipe ends.

In: text. Out: the same text, as long as someone reads it; the run itself never depends on that.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


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
def lasting_output() -> Iterator[None]:
    """Keep this process, including a user's workflow, from failing when the reader of its output goes away."""
    out, err = cast(TextIO, LastingStream(sys.stdout)), cast(TextIO, LastingStream(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class LastingStream:
    """Writes to `stream` until that fails, and then discards everything. Characters that its encoding lacks are
    escaped.

    After a failure the stream's descriptor points to the null device, so that other writers (including the interpreter
    at exit) do not fail either.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or give up the stream."""
        if not self._gone:
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError as error:
                    self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            except (OSError, ValueError):  # closed by the other side; closed by us
                self._give_up()
        return len(text)

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
