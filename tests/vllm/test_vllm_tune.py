"""The quickstart with `engine.type: vllm`, two small steps: the loop, the parity of each step, and a clean end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_served import MODEL, vllm_left, vllm_processes

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.learning.experience.reading import read_groups

QUICKSTART = MODEL.parent


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "engine: vllm (engine.type)"),
        (
            {"execution": "ray", "cluster.num_workers": 1},
            "1 engine(s) (vllm) and 1 rollout worker(s) in actors",
        ),
    ],
)
def test_two_steps_of_the_real_agent_with_vllm(agent, tmp_path, capsys, settings, words):
    """At a temperature other than 1: the trainer's logprobs equal vLLM's in both steps, before and after an update;
    with Ray weights go through its object store. Nothing is left at the end."""
    known = {process.pid for process in vllm_processes()}
    data = str(QUICKSTART / "data")
    result = tune(
        workflow_func=agent.run_agent,
        judge_func=agent.judge,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=2),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=TunerModelConfig(model_path=str(MODEL), max_model_len=512, temperature=0.9),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=4, learning_rate=3e-4),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "engine": {"type": "vllm", "kv_cache_mb": 256, "max_slots": 64},
            "loss.kl": "none",
            "evaluation.max_tasks": 8,
            **settings,
        },
    )
    assert words in capsys.readouterr().out
    assert not vllm_left(known)
    rollouts = [rollout for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts]
    assert len(rollouts) == 2 * 4 * 4
    assert all(rollout.outcome == "ok" for rollout in rollouts)
    assert {int(call.versions_S[0]) for rollout in rollouts for call in rollout.calls} == {0, 1}
    assert any(call.parent is not None for rollout in rollouts for call in rollout.calls)
    lines = [json.loads(line) for line in Path(result.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "trainer/logprob_gap_max" in line]
    assert len(steps) == 2
    assert all(step["trainer/logprob_gap_tokens"] > 0 for step in steps)
    assert max(step["trainer/logprob_gap_max"] for step in steps) < 1e-4
