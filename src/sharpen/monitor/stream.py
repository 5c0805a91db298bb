"""The streams that a run writes to, which may go away: a terminal is closed, a pipe's reader ends.

In: text. Out: the same text, as long as there is somebody to read it; what a run does never depends on that.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let everything that this process prints, a workflow's lines too, outlive whoever reads it."""
    out, err = cast(TextIO, LastingStream(sys.stdout)), cast(TextIO, LastingStream(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class LastingStream:
    """Writes to `stream` until that fails, and from then on nowhere. What its encoding lacks is written as an escape.

    Behind a failure the stream's descriptor leads to the null device, so that what others write there (the interpreter
    too, as it ends) fails no more either.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write all of it, or give the stream up."""
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
        """Pass on what is buffered, or give the stream up."""
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
