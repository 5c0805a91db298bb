"""`make bench-gpu` without a GPU: its formulas by hand, what becomes of a part that fails, and all of it in small."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "gpu"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import formulas
    import run

    yield SimpleNamespace(run=run, formulas=formulas)
    for name in ("run", "formulas", "report"):
        del sys.modules[name]


def shape(bench, **changes):
    numbers = {"parameters": 1000, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return bench.formulas.Shape(**{**numbers, **changes})


def test_training_operations_by_hand(bench):
    """6 N T, and for each of the causal pairs, layers and heads 2 x 8 (scores) + 2 x 8 (values), thrice."""
    assert bench.formulas.causal_pairs([3, 1]) == 6 + 1
    assert bench.formulas.tree_pairs([(0, 3), (3, 2)]) == 6 + (3 * 2 + 3)
    assert bench.formulas.training_flops(shape(bench), 4, 7) == 6 * 1000 * 4 + 3 * 7 * 2 * 4 * (16 + 16)


def test_bound_of_decoding_by_hand(bench):
    """Two sequences of 3 prompt tokens, 2 steps: 2 x 1000 weights of 2 bytes; 128 bytes of keys and values each."""
    assert bench.formulas.kv_bytes_per_token(shape(bench), 2) == 2 * 2 * 2 * 8 * 2
    seconds = (2 * 2000 + 2 * (3 + 4) * 128) / 1e6
    bound = bench.formulas.decode_bound(shape(bench), sequences=2, prompt=3, new=2, itemsize=2, bytes_per_s=1e6)
    assert bound == pytest.approx(4 / seconds)


def test_peaks_are_found_by_whole_words(bench):
    assert bench.formulas.known_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert bench.formulas.known_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert bench.formulas.known_peak("NVIDIA GeForce RTX 5090") is None
    assert bench.formulas.known_peak("") is None


def test_a_part_that_fails_or_hangs_is_named_and_leaves_nothing(bench, tmp_path):
    """Break: return the rows whatever the exit code is."""
    (tmp_path / "gpu_device.json").write_text("[]")
    part = bench.run.part_in_process("device", smoke=True, out=tmp_path, limit_s=0.05)
    assert part["failed"].startswith("stopped after 0.05 s")
    assert part["rows"] == []
    text = bench.run.show([part, {"part": "sync", "rows": [bench_row("weights", 3.0)]}])
    assert "FAILED" in text
    assert "3.000" in text


def bench_row(measure, value):
    return {"measure": measure, "value": value, "unit": "ms", "note": ""}


def test_aims_are_judged_only_where_there_is_a_figure(bench):
    training, parity, sync = bench.run.AIMS
    parts = [{"rows": [bench_row(sync, 12.0)]}]
    judged = [(f"{training} >= 0.4", None), (f"{parity} <= 0.01", None), (f"{sync} <= 10", False)]
    assert bench.run.verdicts(parts) == judged
    assert bench.run.verdicts([{"rows": [bench_row(training, 0.41)]}])[0][1] is True


def test_parts_that_do_not_exist_are_refused(tmp_path):
    command = [sys.executable, str(BENCH / "run.py"), "--only", "engines", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown parts: engines; there are device," in done.stderr


def test_make_test_gpu_runs_every_test_that_needs_a_gpu():
    root = BENCH.parents[1]
    (line,) = [line for line in (root / "Makefile").read_text().splitlines() if line.startswith("GPU_TESTS ?=")]
    folders = [root / name for name in line.split("=")[1].split()]
    marked = [path for path in (root / "tests").rglob("test_*.py") if "mark.gpu\n" in path.read_text()]
    assert len(marked) >= 5
    assert not [path for path in marked if not any(path.is_relative_to(folder) for folder in folders)]


@pytest.mark.slow
def test_the_whole_script_in_small(tmp_path):
    """Under two minutes on a machine that does nothing else."""
    command = [sys.executable, str(BENCH / "run.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "gpu_smoke.json").read_text())["parts"]
    assert not [part for part in parts if "failed" in part]
    assert {part["part"] for part in parts} >= {"device", "engine", "sync", "training-0", "attention", "quickstart"}
    measures = {row["measure"]: row["value"] for part in parts for row in part["rows"]}
    assert measures["share of the bound, 4 x (8 + 8)"] > 0
    assert (tmp_path / "quickstart_reward_curve.png").exists()
