"""Intervals and the sign-flip test against published tables, counts by hand, and simulated runs."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.show.monitor.statistics import (
    accuracy,
    agreed,
    normal_quantile,
    paired_difference,
    ratio,
    sign_flips,
    student,
    student_quantile,
)

TENTHS = st.integers(min_value=-10, max_value=10).map(lambda number: number / 10)


@pytest.mark.parametrize(
    ("degrees", "quantile", "of_five_looks"),
    [
        (1, 12.706, 63.657),
        (2, 4.303, 9.925),
        (3, 3.182, 5.841),
        (4, 2.776, 4.604),
        (9, 2.262, 3.250),
        (10, 2.228, 3.169),
        (19, 2.093, 2.861),
        (30, 2.042, 2.750),
        (60, 2.000, 2.660),
        (120, 1.980, 2.617),
        (100_000, 1.960, 2.576),
    ],
)
def test_students_quantiles_are_those_of_the_tables(degrees, quantile, of_five_looks):
    """The columns t.975 and t.995 of the tables; five looks at 95% are five intervals of 99%."""
    assert student_quantile(degrees) == pytest.approx(quantile, abs=5.1e-4)
    assert student_quantile(degrees, 5) == pytest.approx(of_five_looks, abs=5.1e-4)


def test_more_looks_take_a_wider_interval():
    assert normal_quantile() == pytest.approx(1.95996, abs=1e-5)
    assert normal_quantile(5) == pytest.approx(2.57583, abs=1e-5)  # that of 99%
    assert [round(student_quantile(9, looks), 3) for looks in (1, 5, 25)] == [2.262, 3.250, 4.297]


def test_the_same_value_everywhere_has_no_width_whatever_its_rounding():
    assert student([0.1 + 0.2, 0.3, 0.3]) == pytest.approx((0.3, 0.3))
    low, high = student([0.1 + 0.2, 0.3, 0.3])
    assert low == high
    assert ratio([0.3, 0.1 + 0.2, 0.6], [1, 1, 2])[1:] == pytest.approx((0.3, 0.3))
    assert math.isnan(student([0.5])[0])


@pytest.mark.parametrize(
    ("changes", "chance"),
    [
        ([0.25] * 5 + [0.0] * 5, 1 / 32),  # all five up: one of 32
        ([-3.0] * 6, 1 / 64),
        ([1.0] * 8 + [-1.0], 10 / 512),  # none or one of nine down
        ([3.0, 2.0, -1.0], 2 / 8),  # sums 6 and 4 of -6, -4, -2, 0, 0, 2, 4, 6
        ([0.0] * 10, 1.0),
        ([1.0, -1.0], 3 / 4),
    ],
)
def test_the_chance_of_signs_at_random_by_hand(changes, chance):
    assert sign_flips(changes) == pytest.approx(chance)
    assert sign_flips([1e-7 * change for change in changes]) == pytest.approx(chance)


@given(st.lists(TENTHS, max_size=9))
def test_the_chance_of_signs_at_random_is_that_of_all_signs(changes):
    sums = [
        sum(sign * abs(change) for sign, change in zip(signs, changes, strict=True)) for signs in all_signs(changes)
    ]
    least = abs(sum(changes)) - 1e-9
    assert sign_flips(changes) == pytest.approx(sum(one >= least for one in sums) / len(sums))


def all_signs(changes):
    return list(product((-1, 1), repeat=len(changes)))


def test_on_a_grid_the_chance_is_that_of_drawn_signs():
    """Sizes without a common measure: 200 tasks, 100,000 draws of their signs, whose share is known to 0.0005."""
    generator = np.random.default_rng(2)
    changes = generator.normal(0.15, 1.0, 200)
    signs = generator.integers(0, 2, (100_000, 200), dtype=np.int8) * 2 - 1
    drawn = float((signs @ np.abs(changes).astype(np.float32) >= changes.sum()).mean())
    assert 0.005 < drawn < 0.05
    assert sign_flips(changes) == pytest.approx(drawn, abs=0.0015)


def test_an_interval_goes_as_far_as_zero_where_the_exact_test_does_not_agree():
    assert agreed((0.1, 0.5), [1.0] * 5) == (0.0, 0.5)  # 1/32 > 2.5%
    assert agreed((0.1, 0.5), [1.0] * 6) == (0.1, 0.5)
    assert agreed((-0.5, -0.1), [-1.0] * 5) == (-0.5, 0.0)
    assert agreed((0.1, 0.5), [1.0] * 6, looks=2) == (0.0, 0.5)  # 1/64 > 1.25%


@pytest.mark.parametrize("kind", ["binary", "coarse", "graded", "few change", "skewed"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 10.0), (-1.0, 1.0), (5.0, 5.001)])
def test_the_same_outcome_on_another_scale_has_the_same_interval_on_it(kind, low, high):
    """Red where 0 and 10 have another kind of interval than 0 and 1."""
    for seed in range(20):
        before, after = draw(random_of(seed), kind, 1, 20, gain=0.25)
        first, second = rewards(before[0]), rewards(after[0])
        found = paired_difference(first, second)
        scaled = paired_difference(
            *({task: low + (high - low) * r for task, r in some.items()} for some in (first, second))
        )
        expected = [(high - low) * limit for limit in (found.difference, found.low, found.high)]
        assert [scaled.difference, scaled.low, scaled.high] == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert (found.low > 0, found.high < 0) == (scaled.low > 0, scaled.high < 0)
        mean, other = accuracy(first.values()), accuracy(low + (high - low) * reward for reward in first.values())
        assert (other.low, other.high) == pytest.approx((low + (high - low) * mean.low, low + (high - low) * mean.high))


def test_rounding_is_no_difference():
    """Red where 0.1 + 0.2 against 0.3 on every task is `better by +0.000 [+0.000, +0.000]`."""
    tasks = [str(n) for n in range(12)]
    found = paired_difference(dict.fromkeys(tasks, 0.3), dict.fromkeys(tasks, 0.1 + 0.2))
    assert (found.difference, found.low, found.high) == (0.0, 0.0, 0.0)


def random_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def rewards(row) -> dict[str, float]:
    return {str(task): float(reward) for task, reward in enumerate(row)}


def draw(generator, kind: str, runs: int, tasks: int, gain: float = 0.0):
    """Rewards of so many runs before and after, each of shape (runs, tasks): tasks differ in difficulty, the model is
    the same, or better by `gain`."""
    size = (runs, tasks)
    difficulty = generator.beta(1.5, 1.5, size)
    if kind in ("binary", "coarse", "graded"):
        most = {"binary": 1, "coarse": 2, "graded": 4}[kind]
        return tuple(generator.binomial(most, np.clip(difficulty + more, 0, 1)) / most for more in (0.0, gain))
    if kind == "few change":  # 40% of the tasks, all by a quarter
        before = generator.integers(0, 5, size) / 4
        signs = np.where(generator.random(size) < 0.5 + gain, 1, -1) * (generator.random(size) < 0.4)
        return before, before + signs / 4
    if kind == "four change":
        signs = np.where(generator.random(size) < 0.5 + gain, 1, -1) * (np.arange(tasks) < 4)
        return difficulty, difficulty + signs / 4
    if kind == "skewed":
        return generator.exponential(1.0, size) ** 2, generator.exponential(1.0, size) ** 2 + 10 * gain
    noise = generator.normal(0.0, 0.3, (2, *size))
    return difficulty + noise[0], difficulty + noise[1] + gain


KINDS = ("binary", "coarse", "graded", "few change", "four change", "skewed", "continuous")


def share_called(kind: str, runs: int, tasks: int, gain: float = 0.0) -> float:
    """The share of runs that are called better or, where the model is the same, worse."""
    befores, afters = draw(random_of(tasks), kind, runs, tasks, gain)
    called = 0
    for before, after in zip(befores, afters, strict=True):
        found = paired_difference(rewards(before), rewards(after))
        called += found.low > 0.0 or (gain == 0.0 and found.high < 0.0)
    return called / runs


def at_most(share: float, runs: int) -> float:
    """A share, and three standard errors of its simulation."""
    return share + 3 * math.sqrt(share * (1 - share) / runs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tasks", "runs"), [(10, 1500), (12, 1000), (20, 500), (60, 200), (512, 30)])
def test_a_model_that_is_the_same_is_rarely_called_better_or_worse(kind, tasks, runs):
    """At most 2.5% on each side, so 5%. Red with 1.96 standard errors (`continuous`, `few change`), and with Student's
    interval alone (`four change`)."""
    assert share_called(kind, runs, tasks) <= at_most(0.05, runs)


@pytest.mark.parametrize("kind", ["binary", "few change", "continuous"])
def test_the_best_of_five_is_rarely_called_better(kind):
    """Red where `looks` changes nothing."""
    runs, looks = 300, 5
    generator, false = random_of(3), 0
    for _ in range(runs):
        before, afters = draw(generator, kind, looks, 20)
        found = [paired_difference(rewards(before[0]), rewards(after), looks) for after in afters]
        false += any(one.low > 0.0 for one in found)
    assert false / runs <= at_most(0.025, runs)


@pytest.mark.parametrize(
    ("kind", "tasks", "gain", "share"),
    [
        ("graded", 10, 0.4, 0.8),
        ("continuous", 12, 0.4, 0.8),
        ("graded", 20, 0.3, 0.9),
        ("few change", 60, 0.4, 0.9),
        ("binary", 20, 0.5, 0.6),
        ("binary", 60, 0.3, 0.85),
        ("binary", 512, 0.1, 0.85),
        ("skewed", 60, 0.4, 0.85),
    ],
)
def test_a_better_model_is_called_better(kind, tasks, gain, share):
    assert share_called(kind, 100, tasks, gain) >= share


@pytest.mark.parametrize("tasks", [10, 12, 20])
def test_the_interval_of_a_mean_misses_it_in_at_most_five_of_a_hundred_cases(tasks):
    """Normal rewards, mean 0.5. Red with 1.96 standard errors, which miss it in 8% at 10 tasks and 6.5% at 20."""
    runs = 4000
    found = [accuracy(row) for row in random_of(tasks).normal(0.5, 1.0, (runs, tasks)).tolist()]
    assert sum(not one.low <= 0.5 <= one.high for one in found) / runs <= at_most(0.05, runs)
