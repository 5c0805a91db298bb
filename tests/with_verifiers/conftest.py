"""Tests with the package verifiers, as its registry has it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
collect_ignore_glob = [] if find_spec("verifiers") else ["test_*.py"]  # other environments lack the package
THIRD_PARTY = ("verifiers", "aiohttp", "mcp", "pydantic", "renderers")


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, except for those within the packages that are tested."""
    for package in THIRD_PARTY:
        for kind in ("DeprecationWarning", "UserWarning"):
            config.addinivalue_line("filterwarnings", rf"ignore::{kind}:{package}(\.|$)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here has the marker."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.environments)
