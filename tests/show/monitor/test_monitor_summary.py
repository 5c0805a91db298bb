"""summary.json, the reward curve, and what is measured of the process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sharpen.show.monitor.curve import draw_reward_curve, read_curve, smoothed
from sharpen.show.monitor.statistics import Evaluation
from sharpen.show.monitor.summary import Summary, peak_memory_mb, process_seconds, write_summary
from sharpen.show.monitor.verdict import Verdict

NUMBERS = {
    "seconds": 12.5,
    "seconds_to_first_step": 3.25,
    "steps": 2,
    "rollouts": 16,
    "sampled_tokens": 100,
    "trained_tokens": 90,
    "computed_tokens": 300,
    "peak_memory_mb": 512.0,
}


def evaluation(share: float, **further: Evaluation) -> Evaluation:
    rewards = {str(task): float(task < share * 20) for task in range(20)}
    return Evaluation(greedy=rewards, sampled=rewards, further=further)


def test_summary_has_exactly_the_keys_that_programs_read(tmp_path: Path):
    path = tmp_path / "summary.json"
    summary = Summary(
        before=evaluation(0.25, hard=evaluation(0.0)),
        after=evaluation(0.75, hard=evaluation(0.5)),
        model_dir=tmp_path / "best",
        run_dir=tmp_path,
        verdict=Verdict(kind="worse", model="m", original=True, text="worse", difference=-0.1, low=-0.2, high=-0.05),
        **NUMBERS,
    )
    write_summary(path, summary)
    content = json.loads(path.read_text())
    assert set(content) == {*NUMBERS, "error", "verdict", "before", "after", "further", "model_dir", "run_dir"}
    assert content["verdict"] == {
        "kind": "worse",
        "model": "m",
        "original": True,
        "text": "worse",
        "step": None,
        "measure": "",
        "difference": -0.1,
        "low": -0.2,
        "high": -0.05,
        "num_tasks": 0,
        "remarks": [],
    }
    assert {name: content[name] for name in NUMBERS} == NUMBERS
    assert set(content["before"]) == {"greedy", "sampled"}
    assert content["after"]["greedy"] == {
        "accuracy": 0.75,
        "low": pytest.approx(0.5313, abs=5e-5),
        "high": pytest.approx(0.8881, abs=5e-5),
        "num_tasks": 20,
    }
    assert content["further"]["hard"]["before"]["sampled"]["accuracy"] == 0.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_what_workflow_and_judge_measured_is_in_the_summary_with_the_paired_difference(tmp_path: Path):
    plain, right = evaluation(0.25), {"judge/right": dict(evaluation(0.25).sampled)}
    before = replace(plain, metrics={"sampled": right})
    after = replace(
        plain, metrics={"sampled": {"judge/right": dict(evaluation(0.75).sampled), "judge/new": {"0": 0.5}}}
    )
    write_summary(tmp_path / "s.json", Summary(before=before, after=after, model_dir=None, run_dir=tmp_path, **NUMBERS))
    found = json.loads((tmp_path / "s.json").read_text())["metrics"]["sampled"]
    assert found["judge/right"]["before"]["accuracy"] == 0.25
    assert found["judge/right"]["difference"]["difference"] == 0.5
    assert found["judge/right"]["difference"]["low"] == pytest.approx(0.2234, abs=5e-5)
    assert found["judge/new"]["before"]["accuracy"] is None
    assert found["judge/new"]["difference"] == {"difference": None, "low": None, "high": None, "num_tasks": 0}


def test_what_is_not_known_is_null(tmp_path: Path):
    numbers = {**NUMBERS, "seconds_to_first_step": None, "peak_memory_mb": None}
    one = Evaluation(greedy={"a": 0.5}, sampled={})
    write_summary(tmp_path / "s.json", Summary(before=None, after=one, model_dir=None, run_dir=tmp_path, **numbers))
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["before"] is None
    assert content["verdict"] is None
    assert content["seconds_to_first_step"] is None
    assert content["after"]["greedy"] == {"accuracy": 0.5, "low": None, "high": None, "num_tasks": 1}
    assert content["after"]["sampled"] == {"accuracy": None, "low": None, "high": None, "num_tasks": 0}
    assert "further" not in content


CLOCKS = """
import time
time.sleep(0.3)
from sharpen.show.monitor.summary import run_clock
first = run_clock()
print(first(), run_clock()())
"""


def test_a_runs_time_has_the_imports_of_a_script_and_not_what_came_before_in_its_process():
    """Red while `seconds` counted from the start of the process: the second run of a notebook took hours."""
    found = subprocess.run([sys.executable, "-c", CLOCKS], capture_output=True, text=True, check=True).stdout.split()
    first, second = map(float, found)
    assert first >= 0.3
    assert second < 0.2


def test_this_process_has_used_memory_and_time():
    assert 5 < peak_memory_mb() < 100_000
    assert 0 < process_seconds() < 100_000
    assert process_seconds() <= process_seconds()


def test_smoothing_has_no_lag_and_keeps_constants():
    assert smoothed([0.5] * 30) == [0.5] * 30
    assert smoothed([0.0, 3.0, 6.0]) == [1.5, 3.0, 4.5]
    assert smoothed([]) == []


def test_the_curve_is_read_from_metrics_and_drawn(tmp_path: Path):
    lines = [
        {"step": 0, "eval/greedy/accuracy": 0.3, "eval/greedy/low": 0.2, "eval/greedy/high": 0.4},
        {"step": 1, "reward/mean": 0.4},
        {"step": 2, "reward/mean": None},
        {"step": 2, "eval/sampled/accuracy": 0.5},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    curve = read_curve(metrics)
    assert [(point.step, point.value) for point in curve.reward] == [(1, 0.4)]
    assert [(point.step, point.low, point.high) for point in curve.greedy] == [(0, 0.2, 0.4)]
    assert [(point.step, point.low) for point in curve.sampled] == [(2, None)]
    draw_reward_curve(metrics, tmp_path / "reward_curve.png")
    assert (tmp_path / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_steps_still_has_a_picture(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("")
    draw_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "reward_curve.png")
    assert (tmp_path / "reward_curve.png").exists()
