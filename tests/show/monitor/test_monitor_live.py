"""The block at the bottom of a terminal: what others print goes above it, and no piece of it is left behind."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Iterator

import pytest
from rich.text import Text

from sharpen.screen import columns_of
from sharpen.show.monitor.display import Display, StepReport
from sharpen.show.monitor.live import LiveBlock, can_redraw


class Screen(io.StringIO):
    """A terminal that wraps what is too long, and wraps it anew when its width changes. `lines` are the logical
    lines; the cursor is at the end of the last one, from where it moves up by rows."""

    encoding = "utf-8"

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.lines = [""]

    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        """What is seen."""
        found = []
        for line in self.lines:
            found += [line[start : start + self.columns] for start in range(0, len(line) or 1, self.columns)]
        return found

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[[0-9;]*[a-zA-Z]|\n|\r|[^\x1b\r\n]+", text):
            if part.startswith("\x1b["):
                if part.endswith("A"):
                    self._keep_rows(len(self.rows()) - 1 - int(part[2:-1]))
                elif part.endswith("J"):
                    self._keep_rows(len(self.rows()) - 1) if not self._moved else None
                    self._moved = False
            elif part == "\n":
                self.lines.append("")
            elif part != "\r":
                self.lines[-1] += part
        return len(text)

    _moved = False

    def _keep_rows(self, count: int) -> None:
        """Erase from this row on; the cursor is at its beginning."""
        self._moved = True
        while len(self.rows()) > count and self.lines:
            line = self.lines.pop()
            num = -(-len(line) // self.columns) or 1
            if len(self.rows()) < count:  # a line in the midst of which erasing begins
                self.lines.append(line[: self.columns * (count - len(self.rows()))])
                assert num > 1
                break
        self.lines.append("")


@pytest.fixture
def screen(monkeypatch) -> Screen:
    screen = Screen(60)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return screen


@contextlib.contextmanager
def printing_to(screen: Screen) -> Iterator[None]:
    """Have this process print there, as if it had been started in that terminal."""
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        yield


def block_of(screen: Screen, *lines: str) -> LiveBlock:
    block = LiveBlock(screen, lambda columns: [Text(line) for line in lines])
    block.start()
    return block


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_leaves_the_block_to_its_parent(screen):
    """Red without the process id in `is_ours`: each child would erase the block, and draw one of its own."""
    with printing_to(screen):
        block = block_of(screen, "step 3/8")
        child = os.fork()
        if child == 0:
            print("from a child")
            os._exit(screen.rows() != ["step 3/8from a child", ""])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        block.stop(keep=False)


def test_what_the_process_prints_or_logs_is_above_the_block(screen):
    """Red on the code before: a line on stderr left a copy of the block behind, and was written into it."""
    with printing_to(screen):
        handler = logging.StreamHandler(sys.stderr)
        logger = logging.getLogger("an agent's")
        logger.addHandler(handler)
        block = block_of(screen, "step 3/8", "rollouts 5/64")
        print("from stdout")
        print("from stderr", file=sys.stderr)
        logger.warning("from a logger")
        assert screen.rows() == ["from stdout", "from stderr", "from a logger", "step 3/8", "rollouts 5/64"]
        block.stop(keep=False)
        logger.removeHandler(handler)
        print("after it")
        assert screen.rows() == ["from stdout", "from stderr", "from a logger", "after it", ""]
        assert sys.stdout is screen
        assert sys.stderr is screen
        assert handler.stream is screen


def test_half_a_line_waits_for_its_rest_and_a_foreign_bar_shows_its_last_state(screen):
    with printing_to(screen):
        block = block_of(screen, "step 3/8")
        sys.stderr.write("half of ")
        print("another's line")
        assert screen.rows() == ["another's line", "half of ", "step 3/8"]
        sys.stderr.write("a line\n")
        sys.stderr.write("\r 10%\r 90%")
        sys.stderr.write("\r100%\n")
        block.print_above("a message\n")
        block.stop(keep=False)
        assert screen.rows() == ["another's line", "half of a line", "100%", "a message", ""]


def test_a_terminal_that_becomes_narrower_keeps_no_ghost(screen, monkeypatch):
    """Red where as many rows are erased as lines were drawn: the terminal has wrapped them since."""
    with printing_to(screen):
        block = block_of(screen, "a" * 50, "b" * 45)
        block.print_above("before\n")
        monkeypatch.setenv("COLUMNS", "20")
        screen.columns = 20
        block.print_above("in between\n")
        assert screen.rows() == ["before", "in between", "a" * 18 + "…", "b" * 18 + "…"]
        monkeypatch.setenv("COLUMNS", "60")
        screen.columns = 60
        block.print_above("after\n")
        assert screen.rows() == ["before", "in between", "after", "a" * 50, "b" * 45]
        block.stop(keep=True)
        assert screen.rows()[-3:] == ["a" * 50, "b" * 45, ""]


def test_whoever_keeps_our_stream_can_write_after_the_end(screen):
    """A user's function may have taken sys.stdout, and our own output wraps it."""
    with printing_to(screen):
        block = block_of(screen, "step 3/8")
        taken = sys.stdout
        sys.stdout = other = io.StringIO()
        block.stop(keep=False)
        assert sys.stdout is other, "somebody else's replacement stays"
        taken.write("late\n")
        assert screen.rows() == ["late", ""]


def test_a_forked_child_does_not_draw(screen):
    with printing_to(screen):
        block = block_of(screen, "step 3/8")
        block._pid = os.getpid() + 1  # as a child sees it
        print("child", file=sys.stdout)
        block._pid = os.getpid()
        assert "child" in screen.rows()[-2], "written as it is, where the cursor was"
        block.stop(keep=False)


def test_no_color_takes_the_colours_and_leaves_what_they_say(screen, monkeypatch):
    """What is done and what is left of a bar are different letters."""
    monkeypatch.setenv("NO_COLOR", "1")
    display = Display(4, screen)
    display.step(StepReport(step=1, reward=0.5, tokens_per_s=1.0, seconds=2.0, certified=False))
    (bar,) = [row for row in screen.rows() if "step 1/4" in row and "━" in row]
    assert bar.startswith("━━━╌╌╌╌╌╌╌╌╌  step 1/4")
    assert any("NOT CERTIFIED" in row for row in screen.rows())
    display.close()


@pytest.mark.parametrize(("term", "encoding", "expected"), [("xterm", "utf-8", True), ("dumb", "utf-8", False)])
def test_what_can_be_redrawn(term, encoding, expected, monkeypatch):
    monkeypatch.setenv("TERM", term)
    assert can_redraw(Screen(80)) is expected
    monkeypatch.delenv("COLUMNS", raising=False)
    assert columns_of(Screen(33)) == 80, "no terminal of the system's behind it, and no COLUMNS"
