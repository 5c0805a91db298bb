"""A run with Ray gives what a run in one process gives: the same rollouts, losses and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_toys import put_experts
from ray_workflows import prefers_letter

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.evidence.certificate.certify import certify, read_resolved
from sharpen.learning.experience.draw import draw_batches
from sharpen.learning.experience.reading import read_groups
from sharpen.learning.recipe import Job, recipe_of
from sharpen.placement.cluster.ranks import RankActor, RayRanks
from sharpen.placement.trainers import make_trainer


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


def test_a_mixture_of_experts_is_recorded_by_workers_and_replayed(cluster, tmp_path, write_toy_model, toy_dataset):
    model = put_experts(write_toy_model(tmp_path / "experts"))
    settings = {"deterministic": False, "evaluation.before_and_after": False}
    ray = run(tmp_path / "ray", model, toy_dataset, execution="ray", **settings)
    calls = [call for group in read_groups(ray / "run.db") for one in group.rollouts for call in one.calls]
    assert {call.routes_NLK.shape[1:] for call in calls} == {(2, 2)}
    assert all(step["trainer/logprob_gap_max"] < 1e-4 for step in steps(ray))
    assert certify(ray).holds


def test_recorded_rollouts_train_alike_here_and_in_ranks_on_ray(cluster, tmp_path, toy_model_dir, toy_dataset):
    """The batches of a run's records, by a trainer in this process and by two ranks in actors. Red when a rank trains
    its share alone, without the sum of the gradients."""
    import ray

    recorded = run(tmp_path, toy_model_dir, toy_dataset, execution="local")
    config = read_resolved(recorded / "resolved.json")
    recipe = recipe_of(config)
    job = Job(recipe=recipe, workflow=None, judge=None, folder=toy_model_dir)
    groups = list(read_groups(recorded / "run.db"))
    batches = [draw_batches(groups[start : start + 4], recipe.algorithm, 1) for start in (0, 4, 8)]
    actors = [ray.remote(RankActor).options(num_cpus=1).remote() for _ in range(2)]
    here = make_trainer(job, total_steps=3)
    there = make_trainer(job, total_steps=3, ranks=lambda plan: RayRanks(plan, actors))
    try:
        for step, batch in enumerate(batches, 1):
            one, other = here.train_step(batch, step=step), there.train_step(batch, step=step)
            assert one.num_updates == other.num_updates == 1
            assert other.values["loss"] == pytest.approx(one.values["loss"], abs=1e-6)
            assert other.values["grad_norm"] == pytest.approx(one.values["grad_norm"], rel=1e-4)
    finally:
        there.close()
