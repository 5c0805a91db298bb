"""Honest steps of many kinds, made once more: none of them is called wrong. `make test-slow`; ten minutes or so."""

from __future__ import annotations

import pytest
from faulty_update import make_run

from sharpen.certificate.retrain import retrain

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
    run = make_run(tmp_path, toy_model_dir, toy_dataset, steps=STEPS, rate=1e-3, **KINDS[kind])
    found = retrain(run)
    assert not found.problems
    assert len(found.repeated) == STEPS
    shares = sorted(one.share for one in found.repeated)
    print(f"{kind}: {len(shares)} steps, the furthest tensor at {shares[0]:.0%} to {shares[-1]:.0%} of its bound")
