"""The live lines in a notebook: one output of the cell that is replaced. The shell of a kernel is a stand-in here; done
with a real one (ipykernel 7) by hand."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest

from sharpen.show.monitor.display import Display, StepReport


class Cell(io.StringIO):
    """The output of a cell: what is printed, and what is published."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[dict[str, Any]] = []

    def publish(self, **message: Any) -> None:
        self.published.append(message)

    @property
    def html(self) -> str:
        """The live output, as it is now."""
        return str(self.published[-1]["data"]["text/html"])


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    shell = SimpleNamespace(kernel=object(), display_pub=cell)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[misc]
    return cell


def display_in(cell: Cell) -> Display:
    with contextlib.redirect_stdout(cell):
        return Display(8, sys.stdout)


def step(number: int, **more: Any) -> StepReport:
    return StepReport(step=number, reward=0.5, tokens_per_s=12.0, seconds=2.0, certified=True, **more)


def test_one_output_is_replaced_in_place_and_messages_are_text_of_the_cell(cell: Cell) -> None:
    display = display_in(cell)
    display.message("512 tasks held out")
    display.doing("loading the model toy")
    assert "loading the model toy" in cell.html
    display.step(step(3))
    display.doing("training")
    text = unescape(re.sub(r"<[^>]*>", "", cell.html))
    assert "step 3/8" in text
    assert "certified" in text
    assert "training" in text
    display.close()
    display.close()
    display.message("after it")
    assert cell.html == "", "the cell keeps the lines that were printed, and the result"
    assert len({message["transient"]["display_id"] for message in cell.published}) == 1
    assert [message["update"] for message in cell.published][:2] == [False, True]
    assert cell.getvalue().splitlines() == [
        "512 tasks held out",
        "step 3/8  reward  0.500  2.00 s",
        "after it",
    ]
    assert "\x1b" not in cell.getvalue() + cell.html


def test_names_that_others_gave_are_text(cell: Cell) -> None:
    display = display_in(cell)
    display.doing("loading the model <script>alert(1)</script>")
    assert "<script>" not in cell.html
    assert "&lt;script&gt;" in cell.html
    display.close()


def test_no_notebook_no_output(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not the cell's own stream is a file or a pipe; and IPython has a terminal too, where the shell has no
    kernel."""
    stream = io.StringIO()
    display = Display(8, stream)
    display.doing("training")
    display.close()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=SimpleNamespace))  # type: ignore[misc]
    display = display_in(cell)
    display.doing("training")
    display.close()
    assert cell.published == []
