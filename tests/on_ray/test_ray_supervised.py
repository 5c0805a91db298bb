"""Runs without rollouts on Ray: the trainer's ranks in actors, engines and workers where an agent is evaluated; the
losses are those of a run in one process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ray_workflows import prefers_letter
from test_ray_equality import steps

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.evidence.certificate.certify import certify


def rows(folder: Path, *fields: str) -> DatasetConfig:
    """Twelve rows whose answers all differ."""
    found = [dict(zip(fields, (f"question {i}", f"yes {i}", f"no {i}"), strict=False)) for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return DatasetConfig(path=str(folder / "rows.jsonl"), total_steps=3)


def run(folder: Path, name: str, kind: str, data: DatasetConfig, model: Path, settings: Any, **functions: Any) -> Any:
    return tune(
        **functions,
        train_dataset=data,
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type=kind, batch_size=4, learning_rate=1e-2),
        experiment_name=name,
        settings={"checkpoint_root_dir": str(folder), "deterministic": True, **settings},
    )


def same_losses(local: Path, ray: Path) -> None:
    assert len(steps(ray)) == 3
    for one, other in zip(steps(local), steps(ray), strict=True):
        assert other["trainer/loss"] == pytest.approx(one["trainer/loss"], abs=1e-6)
    assert certify(ray).holds


def test_sft_evaluates_its_agent_in_workers(cluster, tmp_path, toy_model_dir, toy_dataset, capsys):
    """Red when the engines are not given the trainer's weights: the agent is then evaluated as it came."""
    data = rows(tmp_path, "prompt", "response")
    functions = {"workflow_func": prefers_letter, "eval_dataset": DatasetConfig(path=str(toy_dataset), split="test")}
    local = run(tmp_path, "local", "sft", data, toy_model_dir, {"execution": "local"}, **functions)
    capsys.readouterr()
    settings = {"execution": "ray", "cluster.num_workers": 1}
    ray = run(tmp_path, "ray", "sft", data, toy_model_dir, settings, **functions)
    assert (
        "1 engine(s) (embedded) and 1 rollout worker(s) in actors, the trainer in this process"
        in capsys.readouterr().out
    )
    same_losses(local.run_dir, ray.run_dir)
    (before, after), (before_there, after_there) = (
        [(found.greedy, found.sampled) for found in (result.rewards_before, result.rewards_after)]
        for result in (local, ray)
    )
    assert after_there == after != before_there == before


def test_dpo_has_nothing_but_its_trainer_there(cluster, tmp_path, toy_model_dir, capsys):
    """One rank is an actor too."""
    data = rows(tmp_path, "prompt", "chosen", "rejected")
    local = run(tmp_path, "local", "dpo", data, toy_model_dir, {"execution": "local"})
    capsys.readouterr()
    there = run(tmp_path, "ray", "dpo", data, toy_model_dir, {"execution": "ray", "cluster.num_workers": 3})
    shown = capsys.readouterr().out
    assert "execution: ray (joined), the trainer in 1 actor(s)" in shown
    assert "without effect in dpo: cluster.num_workers" in shown
    same_losses(local.run_dir, there.run_dir)
