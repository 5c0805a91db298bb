"""Images on Ray: from a rollout worker to an engine in an actor, and into the run's records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from picture_toys import draw, make_seeing_checkpoint
from ray_workflows import looks_at_a_picture

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups
from sharpen.types import Call


def run(folder: Path, model: Path, rows: Path, execution: str) -> Path:
    result = tune(
        workflow_func=looks_at_a_picture,
        train_dataset=DatasetConfig(path=str(rows), total_steps=2),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=6),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-2),
        settings={
            "checkpoint_root_dir": str(folder),
            "deterministic": True,
            "execution": execution,
            "check.enabled": False,
            "evaluation.before_and_after": False,
            "evaluation.hold_out": False,
            "rollout.failure_reward": 0.0,
        },
    )
    return result.run_dir


def calls(run_dir: Path) -> list[Call]:
    groups = read_groups(run_dir / "run.db")
    return [call for group in groups for rollout in group.rollouts for call in rollout.calls]


def test_a_run_with_images_gives_on_ray_what_it_gives_here(cluster: Any, tmp_path: Path, toy_model_dir: Path) -> None:
    model = make_seeing_checkpoint("qwen3_vl", tmp_path / "model", toy_model_dir)
    rows = tmp_path / "rows.jsonl"
    pictures = [draw(seed, 16, 24) for seed in range(4)]
    rows.write_text("".join(f"{json.dumps({'picture': picture.data_url})}\n" for picture in pictures))
    here, there = (run(tmp_path / kind, model, rows, kind) for kind in ("local", "ray"))
    assert len(calls(here)) == len(calls(there)) == 32
    for one, other in zip(calls(here), calls(there), strict=True):
        np.testing.assert_array_equal(one.sampled_ids_S, other.sampled_ids_S)
        np.testing.assert_allclose(one.logprobs_S, other.logprobs_S, atol=1e-5)
        assert one.pictures == other.pictures
    assert {path.name for path in (there / "images").iterdir()} == {picture.sha256 for picture in pictures}
    assert certify(there).holds
