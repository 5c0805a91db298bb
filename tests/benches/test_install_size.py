"""What an installation takes: who brings what, and that the page of installation says it."""

from __future__ import annotations

import importlib
import re
import tomllib
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("install_size")


def package(folder: Path, name: str, *needs: str) -> Distribution:
    place = folder / f"{name}-1.dist-info"
    place.mkdir()
    place.joinpath("METADATA").write_text(f"Name: {name}\n" + "".join(f"Requires-Dist: {one}\n" for one in needs))
    return PathDistribution(place)


def test_a_package_brings_what_it_needs_but_not_what_an_extra_needs(size: ModuleType, tmp_path: Path) -> None:
    """a needs b, b needs c and a; d is an extra's; e is for another system; f is not here."""
    needs = {"a": ["b>=1", 'd; extra == "more"', 'e; sys_platform == "nowhere"', "f"], "b": ["c", "a"]}
    here = {name: package(tmp_path, name, *needs.get(name, [])) for name in "abcde"}
    assert size.brought(["a"], here) == {"a", "b", "c"}
    assert size.brought(["c"], here) == {"c"}


def test_the_page_says_what_is_measured_here(size: ModuleType) -> None:
    """Red when a dependency of 5 MB or more is added, or one grows by a fifth, and the page is not written again."""
    here = {size.plain(one.metadata["Name"]): one for one in distributions()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = [size.plain(size.Requirement(line).name) for line in project["dependencies"]]
    measured = {}
    for name in names:
        others = size.brought([one for one in names if one != name], here)
        measured[name] = sum(size.megabytes(here[one]) for one in size.brought([name], here) - others)
    text = (ROOT / "docs" / "start" / "install.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| ([\w-]+) \| (\d+) \|", text, re.MULTILINE))
    assert rows.keys() == {name for name, one in measured.items() if one >= 5}
    for name, told in rows.items():
        assert int(told) == pytest.approx(measured[name], rel=0.2, abs=1), name
