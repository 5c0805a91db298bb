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


def test_a_coordinator_that_is_asked_for_more_than_a_core_bounds_every_style(scale):
    """Break: receiving and the rest of a step as if each had a lock of its own."""
    costs = scale.Costs(
        calls=1, tokens=100, worker_s=0.0, receive_s=0.004, step_s=0.004, journal_bytes=0.0, alone_s=0.0
    )
    for gpus in scale.GPUS:
        found = scale.needs(costs, gpus)
        assert all(kept <= min(1.0, 1 / found.coordinator) for kept in found.kept.values())
