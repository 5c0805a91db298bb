"""A few lines at the bottom of a terminal that are redrawn in place, and everything else above them.

In: a function that gives the lines for a width; text from this process (its prints, its stderr, its loggers). Out: the
terminal. Every write is one string: erase the block, print the text, draw the block again.

    what was printed before, and stays in the terminal's history
    a line of the agent's
    ━━━━━━━━━╌╌╌╌╌  step 3/8        <- the block: never longer than the terminal is wide, so that it never wraps
    now: rollouts 5/64

A terminal that becomes narrower wraps the lines that are on it already: the number of rows to erase is counted anew
from their widths. Text without a newline waits in the block's first line until the rest comes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from sharpen.screen import columns_of

REFRESH_S = 0.2


def can_redraw(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can move its cursor and show the bars."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and "utf" in (stream.encoding or "").lower()


class LiveBlock:
    """The lines of `render(columns)` at the bottom of the terminal `stream`, from `start` to `stop`."""

    def __init__(self, stream: TextIO, render: Callable[[int], Sequence[Text]]) -> None:
        self._stream = stream
        self._render = render
        self._console = Console(file=stream, force_terminal=True, highlight=False, width=10_000)
        self._lock = threading.RLock()
        self._drawn: list[int] = []
        self._shown = ""
        self._pending: dict[str, str] = {}
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._refresh_often, name="sharpen-display", daemon=True)
        self._replaced: list[Callable[[], None]] = []

    @property
    def columns(self) -> int:
        """The width of a line that does not wrap, now."""
        return columns_of(self._stream) - 1

    def start(self) -> None:
        """Draw the block, and take over what this process prints."""
        self._take_over()
        self.refresh()
        self._thread.start()

    def stop(self, *, keep: bool) -> None:
        """Let go of the terminal: with `keep`, the last state of the block stays on it."""
        if self._ended.is_set():
            self._give_back()
            return
        with self._lock:
            for source in [source for source, text in self._pending.items() if text]:
                self.print_above("\n", source)
            if keep:
                self.refresh()
            self._ended.set()
            self._send((self._erasing() if not keep else "") + ("\n" if keep and self._drawn else ""))
        self._give_back()

    def refresh(self) -> None:
        """Draw the block again if it has changed."""
        with self._lock:
            if self._ended.is_set():
                return
            lines = self._lines()
            block = "\n".join(map(self._ansi, lines))
            if block != self._shown:
                self._send(self._erasing() + block)
                self._drawn, self._shown = [cell_len(line.plain) for line in lines], block

    def print_above(self, text: str, source: str = "", *, style: str = "") -> None:
        """Print text above the block. What follows its last newline waits for more from the same source."""
        with self._lock:
            whole, newline, rest = f"{self._pending.get(source, '')}{text}".rpartition("\n")
            self._pending[source] = rest.rpartition("\r")[2]  # a bar that somebody else draws over and over
            above = "".join(f"{_overwritten(line)}\n" for line in whole.split("\n")) if newline else ""
            above = self._ansi(Text(above, style)) if style else above
            lines = self._lines()
            block = "\n".join(map(self._ansi, lines))
            self._send(self._erasing() + above + block)
            self._drawn, self._shown = [cell_len(line.plain) for line in lines], block

    @property
    def is_ours(self) -> bool:
        """Whether the block is drawn by this process: not in a forked child, and not after its end."""
        return not self._ended.is_set() and os.getpid() == self._pid

    def _refresh_often(self) -> None:
        while not self._ended.wait(REFRESH_S):
            self.refresh()

    def _lines(self) -> list[Text]:
        columns = columns_of(self._stream)
        waiting = [Text(text, "dim") for text in self._pending.values() if text]
        lines = [*waiting, *self._render(columns)]
        for line in lines:
            line.truncate(max(1, columns - 1), overflow="ellipsis")
        return lines

    def _erasing(self) -> str:
        """Return what erases the drawn lines, which a narrower terminal has wrapped."""
        if not self._drawn:
            return ""
        columns = max(1, columns_of(self._stream))
        rows = sum(max(1, -(-width // columns)) for width in self._drawn)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[0J"

    def _ansi(self, text: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(text, end="", soft_wrap=True)
        return captured.get()

    def _send(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()

    def _take_over(self) -> None:
        """Have sys.stdout, sys.stderr and the loggers that write there print above the block, where they are
        terminals."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None or not stream.isatty():
                continue
            proxy = _Above(self, stream, name)
            setattr(sys, name, proxy)
            self._replaced.append(partial(_put_back, sys, name, stream, proxy))
            for handler in _handlers():
                if handler.stream is stream:
                    handler.stream = proxy
                    self._replaced.append(partial(_put_back, handler, "stream", stream, proxy))

    def _give_back(self) -> None:
        for put_back in self._replaced:
            put_back()


def _put_back(owner: object, name: str, stream: TextIO, proxy: object) -> None:
    """Undo a replacement, unless somebody has replaced the stream since: what is left then only passes text on."""
    if getattr(owner, name) is proxy:
        setattr(owner, name, stream)


def _handlers() -> Iterator[Any]:
    """Yield the handlers of all loggers that write to a stream."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            is_stream = isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
            if is_stream and "stream" in vars(handler):  # and not one that asks sys.stderr each time
                yield handler


def _overwritten(line: str) -> str:
    """Return what a line shows in the end, if carriage returns had it written over."""
    return line.rstrip("\r").rpartition("\r")[2]


class _Above:
    """Stands in for a standard stream: what is written appears above the block, as long as there is one."""

    def __init__(self, block: LiveBlock, stream: TextIO, name: str) -> None:
        self._block = block
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Print the text above the block."""
        if self._block.is_ours:
            self._block.print_above(text, self._name)
            return len(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """Print the lines above the block."""
        for line in lines:
            self.write(line)
