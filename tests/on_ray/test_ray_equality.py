"""A run with Ray gives what a run in one process gives: the same rollouts, losses and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_workflows import prefers_letter

from agenttune import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from agenttune.certify import certify
from agenttune.experience.reading import read_groups


def run(folder: Path, model: Path, data: Path, **settings: Any) -> Path:
    result = tune(
        workflow_func=settings.pop("workflow", prefers_letter),
        train_dataset=DatasetConfig(path=str(data), split="train", total_steps=3),
        eval_dataset=DatasetConfig(path=str(data), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=4, learning_rate=2e-2),
        settings={
            "checkpoint_root_dir": str(folder),
            "deterministic": True,
            "loss.kl": "none",
            "rollout.failure_reward": 0.0,
            **settings,
        },
    )
    return result.run_dir


def steps(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "trainer/loss" in line]


def test_local_and_ray_give_the_same_run(cluster, tmp_path, toy_model_dir, toy_dataset, capsys):
    """Red when `RayServing.publish` loads nothing, and when a worker opens all sessions as "sampled"."""
    local = run(tmp_path / "local", toy_model_dir, toy_dataset, execution="local")
    capsys.readouterr()
    ray = run(tmp_path / "ray", toy_model_dir, toy_dataset, execution="ray")
    shown = capsys.readouterr().out
    assert "execution: ray (joined), 1 engine(s) (embedded) and 2 rollout worker(s) in actors" in shown
    assert "check: 16 rollouts of 4 tasks" in shown
    assert "evaluated after (sampled): 10 tasks" in shown
    ours, theirs = (list(read_groups(folder / "run.db")) for folder in (local, ray))
    assert [group.id for group in ours] == [group.id for group in theirs]
    pairs = list(
        zip((r for group in ours for r in group.rollouts), (r for group in theirs for r in group.rollouts), strict=True)
    )
    assert len({dict(other.metrics)["pid"] for _, other in pairs}) == 2
    for one, other in pairs:
        assert (one.id, one.reward, one.attempt) == (other.id, other.reward, other.attempt)
        for call, same in zip(one.calls, other.calls, strict=True):
            np.testing.assert_array_equal(call.sampled_ids_S, same.sampled_ids_S)
            np.testing.assert_allclose(call.logprobs_S, same.logprobs_S, atol=1e-6)
            np.testing.assert_array_equal(call.versions_S, same.versions_S)
    assert len(steps(ray)) == 3
    for one_step, other_step in zip(steps(local), steps(ray), strict=True):
        assert one_step["trainer/loss"] == pytest.approx(other_step["trainer/loss"], abs=1e-6)
        assert one_step["trainer/grad_norm"] == pytest.approx(other_step["trainer/grad_norm"], abs=1e-5)
    assert certify(ray).holds
