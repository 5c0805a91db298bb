"""Each benchmark runs, in small: by its documented line, with fewer of everything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from lines import BENCHES, ENVIRONMENTS, ROOT, run

pytestmark = pytest.mark.documented


@pytest.mark.parametrize("script", [script for script in BENCHES if script not in ENVIRONMENTS])
def test_it_measures_in_small(script: str, tmp_path: Path) -> None:
    """To its last line, where it writes what it measured; for those that only print, to a figure.

    Break: a rollout in `bench/view/measure.py` by its place among all of them, which in small was none of training.
    """
    pooled = script == "bench/capacity.py"  # what its processes send back is of classes of its `__main__`
    measure(script, tmp_path, Path(sys.executable) if pooled else None)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "name"), ENVIRONMENTS.items())
def test_it_measures_another_side_in_small(script: str, name: str, tmp_path: Path) -> None:
    """Break: `keep_checkpoints` 4 in `bench/trl/ours.py`, and a checkpoint that is asked for is gone."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"make .venv-{name}/installed makes what this compares with")
    measure(script, tmp_path, None if name == "litellm" else python)


def measure(script: str, folder: Path, python: Path | None) -> None:
    """Run a benchmark in small, and look at what it wrote."""
    options = BENCHES[script]
    if script == "bench/gpu/run.py":
        options += f" --out {folder / 'out'}"
    printed = run(script, options, folder, python)
    only_prints = {"bench/plain.py": "further (2) greedy", "bench/install_size.py": " packages, "}
    if script in only_prints:
        assert only_prints[script] in printed
        return
    (written,) = (folder / "out").glob("gpu_smoke.json" if "gpu" in script else "*.json")
    found = json.loads(written.read_text())
    assert found["machine"]["torch"]
    assert found["parts"] if "gpu" in script else found["ratios"]
