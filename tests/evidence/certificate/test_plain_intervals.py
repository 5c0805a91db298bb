"""The intervals that are written out twice are the same numbers, whatever the rewards."""

import math
import random

import pytest

from sharpen.evidence.certificate import intervals
from sharpen.show.monitor.statistics import accuracy, paired_difference, student_quantile

KINDS = {
    "binary": lambda rng: float(rng.random() < 0.6),
    "eighths": lambda rng: rng.randrange(9) / 8,
    "tenths": lambda rng: rng.randrange(11) / 10,
    "real": lambda rng: rng.random(),
    "two": lambda rng: rng.choice([-1.0, 0.3]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_give_the_same_interval(kind):
    """Red with z for t, without the exact test, without Newcombe's correlation, with another number of looks."""
    rng = random.Random(0)
    for _ in range(150):
        before = {str(task): KINDS[kind](rng) for task in range(rng.choice([1, 2, 9, 10, 12, 40]))}
        after = {task: reward if rng.random() < 0.6 else KINDS[kind](rng) for task, reward in before.items()}
        looks, among = rng.choice([1, 1, 4]), {*before.values(), *after.values()}
        one = paired_difference(before, after, looks, among=among)
        other = intervals.difference(before, after, among, looks)
        assert other == pytest.approx((one.difference, one.low, one.high, one.num_tasks), abs=1e-9, nan_ok=True)
        mean = accuracy(before.values(), among=among)
        found = intervals.mean_interval([*before.values()], among)
        assert found == pytest.approx((mean.low, mean.high), abs=1e-9, nan_ok=True)


def test_students_quantiles_agree():
    for degrees in (1, 2, 3, 9, 63, 511, 5000):
        for looks in (1, 3, 20):
            assert math.isclose(
                intervals.student_quantile(degrees, looks), student_quantile(degrees, looks), rel_tol=1e-9
            )
