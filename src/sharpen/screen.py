"""How wide a reader's screen is, and text broken at words to fit it.

In: a stream; a line. Out: the number of columns; lines that fit.

On a terminal no line of ours is wider than it. A word that is (a path) stays whole: broken by us, it could not be
copied. A file or a pipe has no width: a sentence there is one line, for `grep`, and what is laid out (tables,
paragraphs) has at most `PLAIN` columns.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

PLAIN = 100
"""Columns of what is laid out and goes to no terminal; also on a wider one, a paragraph has no more."""
FALLBACK = 80
_WORD = re.compile(r"\s*\S+")
_COLUMN = re.compile(r"(?<=\S) {2,}(?=\S)")


def columns_of(stream: Any) -> int:
    """Return the columns of the terminal behind `stream`, now; of a narrower `COLUMNS`, those."""
    known = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known.append(os.get_terminal_size(stream.fileno()).columns)
    given = os.environ.get("COLUMNS", "")
    known.append(int(given) if given.isascii() and given.isdigit() else 0)
    return min(filter(None, known), default=FALLBACK)


def text_width(stream: Any) -> int:
    """Return how wide tables and paragraphs on `stream` may be, in columns."""
    return min(PLAIN, columns_of(stream)) if stream.isatty() else PLAIN


def cells(text: str) -> int:
    """Return the columns that a text takes: letters of Chinese or Japanese take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fitted(line: str, width: int | None, *, hanging: int | None = None, joint: str = "") -> list[str]:
    """Break a line at its spaces into lines of at most `width` columns (None: not at all). Those after the first are
    indented by `hanging`, by default as far as the text behind a label (`label:  text`), else a little more than the
    first. `joint` ends each line but the last, as the backslash of a command does."""
    if width is None or cells(line) <= width or not line.strip():
        return [line]
    own = len(line) - len(line.lstrip())
    if hanging is None:
        starts = [found.end() for found in _COLUMN.finditer(line) if found.end() <= 2 * width // 5]
        hanging = starts[-1] if starts else own + 2
    lines, current, room = [], "", width - cells(joint)
    for word in _WORD.findall(line):
        bare = word.lstrip()
        indents = [some for some in (hanging, min(hanging, own + 2), 0) if some + cells(bare) <= room]
        if current and indents and cells(current + word) > room:
            lines.append(current + joint)
            current, word = "", " " * indents[0] + bare
        current += word
    return [*lines, current]


def shown(text: str, stream: Any) -> str:
    """Return a text as it is to be printed on `stream`: on a terminal, each of its lines is fitted to that."""
    if not stream.isatty():
        return text
    width = columns_of(stream)
    return "\n".join(part for line in text.split("\n") for part in fitted(line, width))


def command_lines(label: str, command: str, width: int | None) -> list[str]:
    """Return a shell command behind its label. One that does not fit continues on further lines, and can be copied."""
    return fitted(f"{label}{command}", width, hanging=min(len(label), 4), joint=" \\")
