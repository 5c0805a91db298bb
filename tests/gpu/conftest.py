"""Whole runs on a GPU (`make test-gpu`). Every test here has the marker `gpu`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
QUICKSTART = HERE.parents[1] / "examples" / "quickstart"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker("gpu")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The quickstart's agent."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    import agent

    yield agent
    del sys.modules["agent"]
