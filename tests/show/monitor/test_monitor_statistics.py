"""Evaluation statistics against published and hand-computed numbers, and their properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.show.monitor.statistics import (
    Evaluation,
    accuracy,
    accuracy_metrics,
    newcombe,
    paired_difference,
    wilson,
)

COUNTS = st.integers(min_value=0, max_value=60)


@pytest.mark.parametrize(
    ("successes", "tasks", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(successes, tasks, low, high):
    """Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3."""
    assert wilson(successes, tasks) == pytest.approx((low, high), abs=5e-5)


def test_newcombe_gives_the_published_interval():
    """Bentur et al. (2009) as in Fagerland, Lydersen and Laake, chapter 8: 1, 1, 7, 12 gives -0.507 to -0.026."""
    low, high = newcombe(both=1, gained=1, lost=7, neither=12)
    assert (round(low, 3), round(high, 3)) == (-0.507, -0.026)


def test_newcombe_without_correlation_is_the_square_and_add_interval():
    """Marginals 5/10 and 5/10, both x neither - gained x lost = 9 - 4 = 5 = n/2: the correction leaves phi at 0.

    Wilson of 5/10 is 0.5 -+ 0.26341 (z^2 = 3.84146: half = 1.95996 / 1.384146 * sqrt(0.025 + 0.0096036)); the
    interval is 0 -+ sqrt(2) * 0.26341 = 0.37252.
    """
    assert newcombe(both=3, gained=2, lost=2, neither=3) == pytest.approx((-0.37252, 0.37252), abs=1e-5)


def test_accuracy_of_zero_one_rewards():
    found = accuracy([1.0, 0.0, 1.0, 1.0] * 5)
    assert (found.accuracy, found.num_tasks) == (0.75, 20)
    assert (found.low, found.high) == wilson(15, 20)


def test_mean_of_other_rewards_has_students_interval():
    """Mean 0.5, standard deviation of 0.25, 0.5, 0.75 is 0.25, half width 4.302653 * 0.25 / sqrt(3) = 0.621035."""
    found = accuracy([0.25, 0.5, 0.75])
    assert found.accuracy == 0.5
    assert (found.low, found.high) == pytest.approx((0.5 - 0.621035, 0.5 + 0.621035), abs=1e-6)


def test_too_few_tasks_have_an_unknown_interval():
    assert math.isnan(accuracy([]).accuracy)
    assert math.isnan(accuracy([0.5]).low)
    assert accuracy([1.0]).high == 1.0


def test_a_difference_is_paired_by_task_and_only_over_common_tasks():
    before = {"a": 0.0, "b": 0.0, "c": 1.0, "only before": 1.0}
    after = {"c": 1.0, "b": 1.0, "a": 1.0, "only after": 0.0}
    found = paired_difference(before, after)
    assert (found.difference, found.num_tasks) == (pytest.approx(2 / 3), 3)
    assert (found.low, found.high) == newcombe(both=1, gained=2, lost=0, neither=0)


def test_a_paired_difference_of_other_rewards_uses_the_differences():
    """Differences 0.2 and 0.4: mean 0.3, deviation 0.141421, half width 12.706205 * 0.1 = 1.270620."""
    found = paired_difference({"a": 0.1, "b": 0.2}, {"a": 0.3, "b": 0.6})
    assert (found.difference, found.low, found.high) == pytest.approx((0.3, 0.3 - 1.270620, 0.3 + 1.270620), abs=1e-6)


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_newcombe_holds_the_difference_and_mirrors_when_the_sides_are_swapped(both, gained, lost, neither):
    total = both + gained + lost + neither
    if total == 0:
        return
    low, high = newcombe(both, gained, lost, neither)
    assert -1 <= low <= (gained - lost) / total + 1e-12
    assert (gained - lost) / total - 1e-12 <= high <= 1
    assert newcombe(both, lost, gained, neither) == pytest.approx((-high, -low), abs=1e-12)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1))
def test_wilson_holds_the_share_within_zero_and_one(rewards):
    found = accuracy(rewards)
    assert 0 <= found.low <= found.accuracy + 1e-12
    assert found.accuracy - 1e-12 <= found.high <= 1


def test_what_workflow_and_judge_measured_is_logged_by_mode():
    found = Evaluation(greedy={}, sampled={"a": 1.0}, metrics={"sampled": {"judge/right": {"a": 0.5, "b": 1.0}}})
    assert accuracy_metrics(found)["eval/sampled/judge/right"] == 0.75


def test_metrics_of_an_evaluation_are_named_by_mode_and_set():
    evaluation = Evaluation(greedy={"a": 1.0}, sampled={}, further={"hard": Evaluation(greedy={"a": 0.0}, sampled={})})
    metrics = accuracy_metrics(evaluation)
    assert metrics["eval/greedy/accuracy"] == 1.0
    assert metrics["eval_hard/greedy/accuracy"] == 0.0
    assert not any("sampled" in name for name in metrics)
