"""The recording in the documentation: what the script draws, and the picture that is there."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from pages import ROOT

PICTURE = ROOT / "docs" / "images" / "run.svg"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    place = importlib.util.spec_from_file_location("make_recording", ROOT / "docs" / "make_recording.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    sys.modules["make_recording"] = module
    place.loader.exec_module(module)
    return module


def test_each_text_is_drawn_once_and_seen_at_its_times(script: ModuleType) -> None:
    one, two = (("step 1 ", "b"), ("<&>", "green")), (("step 2", "b"),)
    empty = ((),) * (script.ROWS - 1)
    frames = [script.Frame(at, (row, *empty)) for at, row in ((0.0, one), (5.0, two), (10.0, one))]
    found = ElementTree.fromstring(script.picture(frames, "$ sharpen run <&>", 10.0))
    texts = [element for element in found.iter("{http://www.w3.org/2000/svg}text") if element.get("class") != "title"]
    assert ["".join(element.itertext()) for element in texts] == ["step 1<&>", "step 2", "step 1<&>"]  # last: the still
    rules = found.findtext("{http://www.w3.org/2000/svg}style") or ""
    shown = re.findall(r"([\d.]+)%\{visibility:visible\}", rules.partition("@keyframes k1{")[0])
    assert [float(share) for share in shown] == [0.0, 70.0, 100.0]


def test_frames_are_taken_at_equal_distances_and_the_last_is_among_them(script: ModuleType) -> None:
    frames = [script.Frame(float(number), ((str(number), ""),)) for number in range(101)]
    chosen = script.chosen(frames, 4)
    assert [frame.at for frame in chosen] == [25.0, 50.0, 75.0, 100.0]
    assert len(script.chosen([script.Frame(float(number), ()) for number in range(9)], 4)) == 1


def test_the_picture_is_small_and_asks_nobody(tmp_path: Path) -> None:
    content = PICTURE.read_text(encoding="utf-8")
    ElementTree.fromstring(content)
    assert PICTURE.stat().st_size < 300_000
    assert not re.search(r"<script|href=|url\(|@import|<image", content)
    assert "verdict: better" in content
