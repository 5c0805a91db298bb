"""Rollouts in flight across weight updates in whole runs with vLLM: they go on under the new weights, or end first."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from test_sync_end_to_end import BATCH_SIZE, GROUP_SIZE, ages_by_step, check_accounted, rows, run
from vllm_served import MODEL, vllm_left, vllm_processes

from sharpen import WorkflowOutput
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups

SETTINGS = {"engine": {"type": "vllm", "kv_cache_mb": 64, "max_slots": 24}}
LORA = {"trainer.lora": {"rank": 4, "target_modules": ["q_proj", "v_proj", "up_proj"]}}
STEPS = 4  # weights move as long as batches are to begin: with a staleness of 2 three have begun at once


@pytest.mark.parametrize(
    ("sync", "replicas", "lora", "mixed"),
    [({"style": "fully_async", "max_staleness": 2}, 2, {}, True), ({"style": "dynamic_by_explorer"}, 1, LORA, False)],
)
def test_rollouts_in_flight_across_an_update(tmp_path, toy_dataset, sync, replicas, lora, mixed):
    """Rollouts behind the first batch go on calling until a further step is recorded, which is after its sync.
    `fully_async`: there are calls with tokens of two versions; the other styles: none, not even in a rollout. Either
    way what trains is within the bound, and the trainer's logprobs are vLLM's, also those of adapters beside the
    weights and, with them, behind a resume (the first step is the embedded engine's). Red when `load`
    (engine/vllm/loading.py) aborts what is in flight."""
    known = {process.pid for process in vllm_processes()}
    metrics = tmp_path / "P" / "fixed" / "metrics.jsonl"
    begun = 0

    async def calls_until_a_step(task, model):
        nonlocal begun
        begun += 1
        deadline = time.monotonic() + (240 if begun > BATCH_SIZE * GROUP_SIZE else 0)
        messages = [{"role": "user", "content": task["question"]}]
        before, length = steps(metrics), 0
        while True:
            reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=48)
            length += len(reply.choices[0].message.content or "")
            if time.monotonic() > deadline or steps(metrics) > before:
                return WorkflowOutput(reward=length % 7 / 7)

    def session(steps: int, **engine: object) -> Path:
        nonlocal begun
        begun = 0
        return run(
            tmp_path,
            MODEL,
            toy_dataset,
            sync,
            steps=steps,
            workflow=calls_until_a_step,
            settings={**SETTINGS, **lora, "model.inference_engine_num": replicas, **engine},
            learning_rate=1e-2 if lora else 1e-4,
            eval_interval_steps=99,
        ).run_dir

    if lora:
        session(1, engine={"type": "embedded"})
    run_dir = session(STEPS)
    assert not vllm_left(known)
    check_accounted(run_dir, STEPS)
    assert 0 < max(max(ages) for ages in ages_by_step(run_dir)) <= sync.get("max_staleness", 1)
    found = versions(run_dir)
    assert len(found) == STEPS * BATCH_SIZE * GROUP_SIZE
    assert any(len(set(call)) > 1 for rollout in found for call in rollout) == mixed
    assert all(call == sorted(call) for rollout in found for call in rollout)
    if not mixed:
        assert all(len({version for call in rollout for version in call}) == 1 for rollout in found)
    compared = [row["trainer/logprob_gap_max"] for row in rows(run_dir) if "trainer/logprob_gap_max" in row]
    assert len(compared) >= 2
    assert max(compared) < 1e-4
    certificate = certify(run_dir)
    assert certificate.holds, certificate.problems
    if lora:
        assert json.loads((run_dir / "latest" / "adapter" / "adapter_config.json").read_text())["r"] == 4


def steps(metrics: Path) -> int:
    """Steps that are recorded."""
    return metrics.read_text().count("rollout/count") if metrics.exists() else 0


def versions(run_dir: Path) -> list[list[list[int]]]:
    """The versions of each call's tokens, by rollout."""
    scored = [rollout for group in read_groups(run_dir / "run.db") for rollout in group.scored]
    return [[call.versions_S.tolist() for call in rollout.calls] for rollout in scored]
