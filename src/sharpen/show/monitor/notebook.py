"""The live lines of a run in a Jupyter notebook: one output of the cell, which is replaced in place.

In: a function that gives the lines; the shell of the notebook's kernel, if this process is one. Out: HTML, published
under one display id; messages as plain text of the cell, below it. Nothing is imported: where IPython is not loaded,
there is no notebook.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from sharpen.screen import PLAIN
from sharpen.show.monitor.live import LiveBlock, can_redraw

if TYPE_CHECKING:
    from rich.text import Text


REFRESH_S = 0.5
COLUMNS = PLAIN
_COLOURS = {
    "blue": "#3b7dd8",
    "bright_black": "#808080",
    "cyan": "#1f8a9c",
    "green": "#2a8f4f",
    "red": "#d3453b",
    "yellow": "#a97a10",
}
"""Tones that are read on white and on black: a notebook does not say which it is."""
_FRAME = '<pre style="line-height:1.35;margin:0;white-space:pre;overflow-x:auto">{}</pre>'


def notebook_shell() -> Any | None:
    """Return IPython's shell if this process is a notebook's kernel, else None (also in IPython's own terminal)."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if hasattr(shell, "kernel") else None


class NotebookBlock:
    """The lines of `render(columns)` as an output of the running cell, from `start` to `stop`."""

    def __init__(self, shell: Any, stream: TextIO, render: Callable[[int], Sequence[Text]]) -> None:
        self._publisher = shell.display_pub
        self._stream = stream
        self._render = render
        self._id = f"sharpen-{secrets.token_hex(8)}"
        self._console = Console(width=10_000)
        self._lock = threading.Lock()
        self._shown: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._refresh_often, name="sharpen-display", daemon=True)

    @property
    def columns(self) -> int:
        """The width of a line."""
        return COLUMNS

    def start(self) -> None:
        """Open the output."""
        self.refresh()
        self._thread.start()

    def stop(self, *, keep: bool) -> None:
        """End the updates: with `keep`, the last state stays, else the output becomes empty. May be called twice."""
        if keep:
            self.refresh()
        with self._lock:
            if not self._ended.is_set() and not keep:
                self._publish("")
            self._ended.set()

    def refresh(self) -> None:
        """Replace the output if it has changed."""
        with self._lock:
            if not self._ended.is_set():
                self._publish(_FRAME.format("\n".join(map(self._html, self._render(COLUMNS)))))

    def print_above(self, text: str, source: str = "", *, style: str = "") -> None:
        """Print text to the cell, plain: it has no place above the output, nor a style."""
        self._stream.write(text)
        self._stream.flush()

    def _refresh_often(self) -> None:
        while not self._ended.wait(REFRESH_S):
            self.refresh()

    def _publish(self, html: str) -> None:
        if html != self._shown:
            self._publisher.publish(
                data={"text/html": html, "text/plain": ""},
                metadata={},
                transient={"display_id": self._id},
                update=self._shown is not None,
            )
            self._shown = html

    def _html(self, line: Text) -> str:
        return "".join(_span(segment.text, segment.style) for segment in line.render(self._console))


def _span(text: str, style: Any) -> str:
    """Return text of one style. It is escaped: metrics have names that others gave them."""
    css = ""
    if style is not None and style.color is not None:
        css += f"color:{_COLOURS[style.color.name]};"
    if style is not None and style.bold:
        css += "font-weight:600;"
    if style is not None and style.dim:
        css += "opacity:.7;"
    return f'<span style="{css}">{escape(text)}</span>' if css else escape(text)


# Where the live lines of a run are shown: at the bottom of a terminal, in a notebook's output, or nowhere.
#
# In: the stream that a run prints to. Out: a `Block`, None where nothing can be drawn again.


class Block(Protocol):
    """Lines that are shown over and over, and text beside them."""

    @property
    def columns(self) -> int:
        """The width of a line."""

    def start(self) -> None:
        """Begin to show the lines."""

    def stop(self, *, keep: bool) -> None:
        """Show the lines no longer; with `keep`, their last state stays. May be called twice."""

    def refresh(self) -> None:
        """Show the lines as they are now."""

    def print_above(self, text: str, source: str = "", *, style: str = "") -> None:
        """Print text that stays, also after `stop`."""


def block_for(stream: TextIO, lasting: TextIO, render: Callable[[int], Sequence[Text]]) -> Block | None:
    """Return what shows the lines of `render(columns)` where `stream` leads to; it writes to `lasting`."""
    if can_redraw(stream):
        return LiveBlock(lasting, render)
    if stream is sys.stdout and (shell := notebook_shell()) is not None:
        return NotebookBlock(shell, lasting, render)
    return None
