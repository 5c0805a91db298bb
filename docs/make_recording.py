"""Records a command in a terminal and writes it as an animated picture: `python docs/make_recording.py`.

In: nothing; a folder of `sharpen init` is made, and `sharpen run` is recorded in it (needs `pip install pyte`, which
reads a terminal's output). Out: images/run.svg, played faster than it was: the picture says how much. Who asks for less
motion sees the last moment alone.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).with_name("images") / "run.svg"
COLUMNS, ROWS = 104, 28
PLAYED_S, HELD_S, FRAMES = 14.0, 6.0, 50
LETTER, LINE, EDGE, BAR = 8.4, 19, 18, 34
STYLE = """\
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;fill:#d7dce5}
.b{font-weight:700}.blue{fill:#6ea8fe}.green{fill:#5fd38d}.yellow,.brown{fill:#e6c07b}.cyan{fill:#62cfd6}.red{fill:#ff7b72}
.brightblack{fill:#7d8696}.title{fill:#9aa3b2}"""
COLOURS = {"blue", "green", "brown", "yellow", "cyan", "red", "brightblack"}
Row = tuple[tuple[str, str], ...]
"""A row of the screen: pieces of text with their classes."""


@dataclass(frozen=True)
class Frame:
    """What the terminal shows from `at` seconds on."""

    at: float
    rows: tuple[Row, ...]


def record(command: Sequence[str], folder: Path) -> list[tuple[float, bytes]]:
    """Run a command in a terminal of its own; return what it writes, with the seconds since its start."""
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.chdir(folder)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.environ.pop("NO_COLOR", None)
        os.execvp(command[0], command)
    began, written = time.monotonic(), []
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the command has ended
            break
        if not data:
            break
        written.append((time.monotonic() - began, data))
    os.close(terminal)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return written


def frames_of(written: Sequence[tuple[float, bytes]]) -> Iterator[Frame]:
    """Yield what the screen shows after each piece."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream, decode = pyte.Stream(screen), codecs.getincrementaldecoder("utf-8")()
    for at, data in written:
        stream.feed(decode.decode(data))
        yield Frame(at, tuple(_row(screen, number) for number in range(ROWS)))


def _row(screen: Any, number: int) -> Row:
    pieces: list[tuple[str, str]] = []
    for column in range(COLUMNS):
        letter = screen.buffer[number][column]
        colour = letter.fg if letter.fg in COLOURS else ""
        style = " ".join(filter(None, (colour, "b" if letter.bold else "")))
        if pieces and pieces[-1][1] == style:
            pieces[-1] = (pieces[-1][0] + letter.data, style)
        else:
            pieces.append((letter.data, style))
    while pieces and not pieces[-1][0].strip():
        pieces.pop()
    return tuple(pieces)


def chosen(frames: Sequence[Frame], count: int) -> list[Frame]:
    """Return so many frames at equal distances, and the last one."""
    whole = frames[-1].at
    found: list[Frame] = []
    for number in range(count):
        until = whole * (number + 1) / count
        frame = [one for one in frames if one.at <= until or one is frames[0]][-1]
        if not found or found[-1].rows != frame.rows:
            found.append(frame)
    return found


def picture(frames: Sequence[Frame], title: str, whole_s: float) -> str:
    """Return the animation as SVG. Each row is drawn once for each text that it ever has, and is seen at its times."""
    total = PLAYED_S + HELD_S
    starts = [frame.at / whole_s * PLAYED_S for frame in frames]
    rules, drawn = [], []
    for number in range(ROWS):
        for text, spans in _spans([frame.rows[number] for frame in frames], starts, total).items():
            name = f"k{len(rules)}"
            rules.append(_rule(name, spans, total))
            drawn.append(_text(text, number, name))
    width, height = round(COLUMNS * LETTER + 2 * EDGE), BAR + ROWS * LINE + EDGE
    last = "".join(_text(row, number, "") for number, row in enumerate(frames[-1].rows) if row)
    box = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
        f"<style>{STYLE}\n.still{{display:none}}\n{''.join(rules)}"
        "@media (prefers-reduced-motion:reduce){.film{display:none}.still{display:inline}}</style>"
        f'<rect width="{width}" height="{height}" rx="10" fill="#151a23"/>'
        f'<text class="title" x="{EDGE}" y="23">{escape(title)}</text>'
        f'<g class="film">{"".join(drawn)}</g><g class="still">{last}</g></svg>\n'
    )


def _spans(rows: Sequence[Row], starts: Sequence[float], total: float) -> dict[Row, list[tuple[float, float]]]:
    """Return when each text of a row is seen."""
    spans: dict[Row, list[tuple[float, float]]] = {}
    for place, row in enumerate(rows):
        end = starts[place + 1] if place + 1 < len(starts) else total
        if not row:
            continue
        found = spans.setdefault(row, [])
        if found and found[-1][1] == starts[place]:
            found[-1] = (found[-1][0], end)
        else:
            found.append((starts[place], end))
    return spans


def _rule(name: str, spans: Sequence[tuple[float, float]], total: float) -> str:
    """Return the CSS by which a text is seen at these times."""
    steps = ["0%{visibility:hidden}"]
    for begin, end in spans:
        steps.append(f"{100 * begin / total:.2f}%{{visibility:visible}}")
        steps.append(f"{100 * end / total:.2f}%{{visibility:{'visible' if end >= total else 'hidden'}}}")
    shown = f".{name}{{visibility:hidden;animation:{name} {total:g}s step-end infinite}}"
    return f"@keyframes {name}{{{''.join(steps)}}}{shown}\n"


def _text(row: Row, number: int, name: str) -> str:
    """Draw a row: each piece begins where its column is, whatever letters are wide."""
    spans, column = [], 0
    for text, style in row:
        if text.strip():
            inside = text.rstrip()
            lead = len(inside) - len(inside.lstrip())
            place = EDGE + (column + lead) * LETTER
            of = f' class="{style}"' if style else ""
            length = f' textLength="{len(inside.lstrip()) * LETTER:.1f}"'
            spans.append(f'<tspan x="{place:.1f}"{length}{of}>{escape(inside.lstrip())}</tspan>')
        column += len(text)
    of = f' class="{name}"' if name else ""
    return f'<text y="{BAR + (number + 1) * LINE - 5}"{of}>{"".join(spans)}</text>'


def main() -> None:
    """Make the folder, record the run, write the picture."""
    command = ["sharpen", "run", "--config", "run.yaml", "--set", "name=first"]
    program = [sys.executable, "-m", "sharpen.cli.main"]
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run([*program, "init", "first"], cwd=temporary, check=True)
        written = record([*program, *command[1:]], Path(temporary) / "first")
    everything = list(frames_of(written))
    frames, whole = chosen(everything, FRAMES), everything[-1].at
    title = f"$ {' '.join(command)}   ({whole:.0f} s on a CPU, played in {PLAYED_S:.0f})"
    PICTURE.write_text(picture(frames, title, whole), encoding="utf-8")
    print(f"{PICTURE}: {len(frames)} frames, {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
