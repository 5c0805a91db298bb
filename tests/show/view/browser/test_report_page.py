"""The report of a run: it fits a phone and a sheet of paper, and asks for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharpen.show.report.contents import read_report
from sharpen.show.report.render import html

pytestmark = pytest.mark.browser
PHONE = {"width": 420, "height": 800}
SHEET = {"width": 680, "height": 960}
"""A4 without its margins."""


@pytest.mark.parametrize(("medium", "size"), [("screen", PHONE), ("print", SHEET)])
def test_the_report_shows_all_of_its_table(browser, states: Path, tmp_path: Path, medium: str, size):
    """Red when the table of results is cut off or has to be scrolled, on a phone or on paper."""
    path = tmp_path / "report.html"
    path.write_text(html(read_report(states / "whole")), encoding="utf-8")
    page = browser.new_page(viewport=size)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.emulate_media(media=medium)
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    cells = page.locator("td[data-label]")
    assert cells.count() >= 5
    edges = [cell.bounding_box() for cell in cells.all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= size["width"] for box in edges)
    wide = "[...document.querySelectorAll('.wide')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert page.evaluate(wide) == 0
    shown = page.locator(".chart .up text").first.evaluate("(one) => getComputedStyle(one).fontSize")
    assert float(shown.removesuffix("px")) >= 10
    page.close()
    assert complaints == []
