"""Honest steps of many kinds, made once more: none of them is called wrong. `make test-slow`; ten minutes or so."""

from __future__ import annotations

import json

import pytest
from faulty_update import make_run

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.evidence.certificate.plain.retrain import retrain

STEPS = 40
KINDS = {
    "one update": {},
    "several updates": {"trainer.num_minibatches": 2, "trainer.epochs": 2},
    "bfloat16": {"trainer.dtype": "bfloat16"},
    "several updates in bfloat16": {"trainer.dtype": "bfloat16", "trainer.num_minibatches": 2, "trainer.epochs": 2},
    "adapters": {"trainer.lora.rank": 4},
    "muon": {"trainer.optimizer": "muon"},
    "several updates with muon": {"trainer.optimizer": "muon", "trainer.num_minibatches": 2},
    "ahead": {"sync.offset": 1, "loss.behaviour": "truncated", "trainer.num_minibatches": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_honest_steps_raise_no_alarm(kind, tmp_path, toy_model_dir, toy_dataset):
    assert_no_alarm(kind, make_run(tmp_path, toy_model_dir, toy_dataset, steps=STEPS, rate=1e-3, **KINDS[kind]))


@pytest.mark.slow
def test_honest_steps_on_rows_raise_no_alarm(tmp_path, toy_model_dir):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"question {i}", "response": f"{i % 7} " * (1 + i % 5)}) + "\n" for i in range(40)
        )
    )
    result = tune(
        train_dataset=DatasetConfig(path=str(rows), total_steps=STEPS),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
        algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=4, learning_rate=1e-3, save_interval_steps=1),
        settings={"checkpoint_root_dir": str(tmp_path), "trainer.keep_checkpoints": 100},
    )
    assert_no_alarm("sft", result.run_dir)


def assert_no_alarm(kind, run):
    found = retrain(run)
    assert not found.problems
    assert len(found.repeated) == STEPS
    shares = sorted(one.share for one in found.repeated)
    print(f"{kind}: {len(shares)} steps, the furthest tensor at {shares[0]:.0%} to {shares[-1]:.0%} of its bound")
