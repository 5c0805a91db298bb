"""Fixtures of the tests with clients from their registries: rollouts through a gateway over a scripted engine."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from rollout_fixtures import rollouts, serving, tokenizer

__all__ = ["rollouts", "serving", "tokenizer"]
pytest.register_assert_rewrite("framework_checks")
HERE = Path(__file__).parent
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks a server for prices
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
collect_ignore_glob = [] if find_spec("autogen_agentchat") else ["test_*.py"]  # other environments lack the clients
THIRD_PARTY = ("autogen_agentchat", "autogen_core", "autogen_ext", "google", "litellm", "minisweagent", "smolagents")


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, except for those within the packages that are tested."""
    for package in THIRD_PARTY:
        config.addinivalue_line("filterwarnings", rf"ignore::DeprecationWarning:{package}(\.|$)")
        config.addinivalue_line("filterwarnings", rf"ignore::UserWarning:{package}(\.|$)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here has the marker."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker("clients")
