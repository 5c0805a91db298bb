"""Tasks on disk, and models of an owner that follow a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sharpen import DatasetConfig

NUM_TASKS = 12


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetConfig:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1), "n": n} for n in range(NUM_TASKS)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(tmp_path), split="test")
