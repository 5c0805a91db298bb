"""Fixtures of the tests with packages that want `openai` below 3: an environment of their own (make test-openai2)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from rollout_fixtures import rollouts, serving, tokenizer

__all__ = ["rollouts", "serving", "tokenizer"]
pytest.register_assert_rewrite("framework_checks")
HERE = Path(__file__).parent
os.environ.setdefault("OTEL_SDK_DISABLED", "true")  # else CrewAI sends what it did to its maker
collect_ignore_glob = [] if find_spec("crewai") else ["test_*.py"]  # other environments lack the packages


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, except for those within the packages that are tested."""
    for package in ("crewai", "crewai_core", "chromadb", "lancedb", "llama_index"):
        config.addinivalue_line("filterwarnings", rf"ignore::DeprecationWarning:{package}(\.|$)")
        config.addinivalue_line("filterwarnings", rf"ignore::UserWarning:{package}(\.|$)")
    config.addinivalue_line("filterwarnings", "ignore:Cannot set an attribute on .crewai:ImportWarning")
    config.addinivalue_line("filterwarnings", "ignore::pydantic.warnings.PydanticDeprecationWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here has the marker."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker("clients")
