"""A mixture of experts from `tune()` to the certificate: its experts are recorded, replayed, kept and checked."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from expert_toys import put_experts
from transformers import AutoModelForCausalLM

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups


async def prefers_letter(task, model):
    """Two calls, the second of which continues the first; the reward is the share of the letter 'e'."""
    messages = [{"role": "user", "content": task["question"]}]
    text = ""
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
        said = reply.choices[0].message.content or ""
        text += said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return WorkflowOutput(reward=text.count("e") / 8)


@pytest.fixture
def moe_dir(tmp_path: Path, write_toy_model) -> Path:
    """The toy model's tokenizer with a mixture of 8 experts."""
    return put_experts(write_toy_model(tmp_path / "model"))


def run(folder: Path, model: Path, dataset: Path, **settings):
    return tune(
        workflow_func=prefers_letter,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=4),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-2, save_interval_steps=1
        ),
        settings={
            "checkpoint_root_dir": str(folder),
            "rollout.failure_reward": 0.0,
            "evaluation.before_and_after": False,
            "check.enabled": False,
            **settings,
        },
    )


def test_it_learns_with_its_experts_recorded_and_the_certificate_holds(tmp_path, moe_dir, toy_dataset):
    """With the reference's KL, which chooses its own experts: at the start it is zero. Then the record is falsified."""
    result = run(tmp_path / "runs", moe_dir, toy_dataset, **{"loss.kl": "k3", "loss.kl_coef": 0.01})
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "trainer/logprob_gap_max" in row]
    assert len(steps) == 2
    assert all(row["trainer/logprob_gap_max"] < 1e-4 for row in steps)
    assert all(row["trainer/rerouted_tokens"] == 0 for row in steps)
    assert steps[0]["trainer/kl_reference"] < 1e-6
    for group in read_groups(result.run_dir / "run.db"):
        for call in (call for rollout in group.rollouts for call in rollout.calls):
            assert call.routes_NLK.shape == (len(call.prompt_ids_P) + len(call.sampled_ids_S) - 1, 2, 2)
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    trained = AutoModelForCausalLM.from_pretrained(result.model_dir)
    assert trained.config.model_type == "qwen3_moe"
    with closing(sqlite3.connect(result.run_dir / "run.db")) as connection, connection:
        connection.execute("DELETE FROM call_routes WHERE rowid = (SELECT MAX(rowid) FROM call_routes)")
    certificate = certify(result.run_dir)
    assert not certificate.holds
    assert any("experts" in problem for problem in certificate.problems)
