"""Each benchmark runs, in small: by its documented line, with fewer of everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lines import BENCHES, ENVIRONMENTS, ROOT, run

pytestmark = pytest.mark.documented


@pytest.mark.parametrize("script", BENCHES)
def test_it_measures_in_small(script: str, tmp_path: Path) -> None:
    """To its last line, where it writes what it measured; for `plain.py`, which only prints, an accuracy.

    Break: `keep_checkpoints` 4 in `bench/trl/ours.py`, and a checkpoint that is asked for is gone.
    """
    name = ENVIRONMENTS.get(script)
    python = {} if name is None else {"python": ROOT / f".venv-{name}" / "bin" / "python"}
    options = BENCHES[script]
    if script == "bench/gpu/run.py":
        options += f" --out {tmp_path / 'out'}"
    printed = run(script, options, tmp_path, **python)
    if script == "bench/plain.py":
        assert "further (2) greedy" in printed
        return
    (written,) = (tmp_path / "out").glob("*.json") if "gpu" not in script else (tmp_path / "out").glob("gpu_smoke.json")
    found = json.loads(written.read_text())
    assert found["machine"]["torch"]
    assert found["parts"] if "gpu" in script else found["ratios"]
