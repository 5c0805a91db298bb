"""Fixtures of the tests of other programs' formats: a run with three agents, once for all tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorded_agents import run_of
from rollout_fixtures import rollouts, serving, tokenizer

__all__ = ["rollouts", "serving", "tokenizer"]


@pytest.fixture
def run(rollouts: Any, tmp_path: Path) -> Path:
    """A folder with a `run.db`: the rollouts of three agents, on two tasks each."""
    return run_of(rollouts, tmp_path / "run")
