"""Tests with the packages of environments, as their registries have them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if find_spec("textarena") else ["test_*.py"]  # other environments lack the packages
THIRD_PARTY = ("reasoning_gym", "sympy", "verifiers", "gymnasium", "textarena", "nltk")


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, except for those within the packages that are tested."""
    config.addinivalue_line("filterwarnings", "ignore::SyntaxWarning")  # of packages when they are compiled first
    for package in THIRD_PARTY:
        for kind in ("DeprecationWarning", "UserWarning"):
            config.addinivalue_line("filterwarnings", rf"ignore::{kind}:{package}(\.|$)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here has the marker."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.environments)
