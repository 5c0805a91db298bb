"""Where the live lines of a run are shown: at the bottom of a terminal, in a notebook's output, or nowhere.

In: the stream that a run prints to. Out: a `Block`, None where nothing can be drawn again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from sharpen.show.monitor.live import LiveBlock, can_redraw
from sharpen.show.monitor.notebook import NotebookBlock, notebook_shell

if TYPE_CHECKING:
    from rich.text import Text


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
