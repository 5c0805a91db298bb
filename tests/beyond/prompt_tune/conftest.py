"""Tasks to tune on, tasks held out, and a cache of DSPy's that is empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dspy
import pytest
from levels import write

from sharpen import DatasetConfig


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path) -> Iterator[None]:
    before = dspy.cache
    dspy.configure_cache(disk_cache_dir=str(tmp_path / "dspy_cache"))
    yield
    dspy.cache = before


@pytest.fixture
def train(tmp_path: Path) -> DatasetConfig:
    return write(tmp_path / "train.jsonl", range(20))


@pytest.fixture
def held_out(tmp_path: Path) -> DatasetConfig:
    return write(tmp_path / "test.jsonl", range(100, 130))
