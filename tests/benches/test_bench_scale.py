"""What the simulation of many GPUs says, worked out by hand."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("scale")
    del sys.modules["scale"]


def test_a_synchronous_step_takes_the_sum_of_its_parts(scale):
    """Break: `min` for the sum, or a step whose weights cost nothing."""
    took = scale.Durations(rollouts=10.0, step=1.0, train=4.0, weights=0.5)
    assert scale.seconds(scale.STYLES["synchronous"], took) == pytest.approx(scale.STEPS * 15.5)


def test_rollouts_ahead_hide_what_is_shorter_than_they(scale):
    """The GPUs that sample are never free; after the last batch come its training and its weights. If the training is
    the longer part, all rollouts but those of the first batch are hidden; once the last batch has begun, two steps
    behind, weights are loaded once more, at the end.

    Break: weights that are loaded before each batch is trained, or batches that take their GPUs from each other.
    """
    last = scale.Durations(rollouts=10.0, step=1.0, train=4.0, weights=0.5)
    assert scale.seconds(scale.STYLES["fully_async"], last) == pytest.approx(scale.STEPS * 10.0 + 5.5)
    first = scale.Durations(rollouts=4.0, step=1.0, train=10.0, weights=0.5)
    assert scale.seconds(scale.STYLES["fully_async"], first) == pytest.approx(
        4.0 + scale.STEPS * 11.0 + (scale.STEPS - 2) * 0.5
    )


def test_what_gpus_need_by_hand(scale):
    """64 GPUs, of which 48 sample 3,000 tokens a second: 144,000. Rollouts of 8 calls of 100 tokens: 180 a second, of
    which each takes the coordinator 2 + 3 ms, one process 10 + 3, and 20 ms of a worker. Six machines load 16 GB.

    Break: seconds of a worker for those of the coordinator; calls counted as rollouts.
    """
    costs = scale.Costs(
        calls=8, tokens=800, worker_s=0.020, receive_s=0.002, step_s=0.003, journal_bytes=1e5, alone_s=0.010
    )
    found = scale.needs(costs, 64)
    assert found.calls_per_s == pytest.approx(8 * 180)
    assert found.coordinator == pytest.approx(0.9)
    assert found.alone == pytest.approx(2.34)
    assert found.worker_cores == pytest.approx(3.6)
    assert found.journal_mb_per_s == pytest.approx(18.0)
    assert found.step_s == pytest.approx(48 * 64 * 0.003)
    assert found.weights_s == pytest.approx(6 * 16 / 50)
    assert scale.ends_at(found.coordinator, 64) == pytest.approx(64 / 0.9)


def test_what_is_kept_where_the_lock_binds_by_hand(scale):
    """8 GPUs: 384 rollouts a step sample for 2.13 s, train for 2.33 s, and have their weights moved in 0.32 s. The
    coordinator receives them for 7.68 s and needs 1.54 s more. Synchronous, these follow each other; ahead, receiving
    and the rest overlap, but share the lock: 9.22 s.

    Break: the bound of a run whose GPUs only sample (1 / 4.32) for both, or no bound (0.31 of the run ahead).
    """
    costs = scale.Costs(
        calls=1, tokens=100, worker_s=0.0, receive_s=0.020, step_s=0.004, journal_bytes=0.0, alone_s=0.0
    )
    found = scale.needs(costs, 8)
    train = 38_400 / (2 * scale.TRAINED_PER_S)
    sample = 384 / 180
    assert found.coordinator == pytest.approx(4.32)
    assert found.kept["synchronous"] == pytest.approx((sample + train) / (7.68 + 1.536 + train + 0.32))
    assert found.kept["fully_async"] == pytest.approx((sample + scale.STEPS * train) / (scale.STEPS * 9.216))
