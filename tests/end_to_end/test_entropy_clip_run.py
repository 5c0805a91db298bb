"""A whole run with an entropy clip: what it notes, and what the certificate says of it."""

import json

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.evidence.certificate.certify import certify


async def holds_letter(task, model):
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
    )
    return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))


def test_a_run_with_clipb_says_what_it_left_out_and_certify_says_what_it_cannot_recompute(
    tmp_path, toy_model_dir, toy_dataset
):
    result = tune(
        workflow_func=holds_letter,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128, max_tokens=4),
        algorithm=AlgorithmConfig(algorithm_type="dapo", group_size=4, batch_size=4, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "evaluation.before_and_after": False,
            "check.enabled": False,
            "loss.advantage": "clipb",
            "loss.advantage_args": {"mu": 0.2},
        },
    )
    lines = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    rows = [row for row in lines if "trainer/grad_norm" in row]
    assert any(row["trainer/entropy_clip_fraction"] > 0 for row in rows)
    assert all(row["trainer/entropy_clip_fraction"] <= row["trainer/entropy_clip_fraction_negative"] for row in rows)
    found = certify(result.run_dir)
    assert found.holds, found.problems
    exception, *_ = found.not_recomputed
    assert "entropy" in exception
