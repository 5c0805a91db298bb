"""Answers are marked by keys in a browser, and the file has each mark before the next answer is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from browsed_runs import HOSTILE, listening
from conftest import NARROW, WIDE, open_window, until
from test_pages import AXE

from sharpen.evidence.judges.marks import Answer, read_marks
from sharpen.show.view.labelling import Labelling

pytestmark = pytest.mark.browser
LISTENS = "!document.getElementById('keys-open').hidden"
"""The page's scripts have run."""
ANSWERS = [
    Answer(task={"question": "What is 2 + 2?", "answer": "4"}, text="It is 4.", rollout="r/0"),
    Answer(task={"question": "Say it.", "answer": ["a", 1]}, text=HOSTILE, rollout="r/1"),
    Answer(task={"state": "no question"}, text="word " * 2000, rollout="r/2"),
    Answer(task={"question": "And now?"}, text="x", rollout="r/3"),
]


def test_answers_are_marked_by_keys(browser, tmp_path: Path):
    """The page fits, is accessible in both themes, complains of nothing, and has the reference folded."""
    marks = tmp_path / "marks.jsonl"
    with listening(Labelling(ANSWERS, marks).app) as address:
        window = open_window(browser, address)
        page = window.open("/")
        until(page, LISTENS)
        reference = page.locator("#rest dd").first
        assert not reference.is_visible()
        page.keyboard.press("r")
        assert reference.inner_text() == "4"
        page.evaluate(AXE.read_text(encoding="utf-8"))
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            assert page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"] == []
        for place, (key, written) in enumerate([("y", [True]), ("n", [True, False]), ("s", [True, False])], 1):
            for size in (NARROW, WIDE):
                page.set_viewport_size(size)
                assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
            assert page.locator("h1").inner_text() == f"Answer {place} of 4"
            page.keyboard.down(key)
            page.get_by_role("heading", name=f"Answer {place + 1} of 4").wait_for()
            until(page, LISTENS)
            page.keyboard.down(key)  # held: it marks no further answer
            page.keyboard.up(key)
            assert [mark.good for mark in read_marks(marks)] == written
        assert page.evaluate("window.broken") is None
        page.get_by_role("button", name="Not good").click()
        page.get_by_role("heading", name="No answer is left").wait_for()
        assert [mark.answer for mark in read_marks(marks)] == [ANSWERS[0], ANSWERS[1], ANSWERS[3]]
        page.context.close()
        assert window.complaints == []
