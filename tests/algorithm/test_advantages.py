"""Advantages: numbers worked out by hand, and what no change of a group may alter."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttune.algorithm.advantages import grpo, reward_std, step_wise_grpo

rewards = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=12)


def test_grpo_by_hand() -> None:
    # mean 0.25; deviations 0.75, -0.25, -0.25, -0.25; sum of squares 0.5625 + 3 * 0.0625 = 0.75; / 3 = 0.25; std 0.5
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6)
    np.testing.assert_allclose(grpo(np.array([1.0, 0.0, 0.0, 0.0])), expected, rtol=1e-14)
    np.testing.assert_allclose(grpo(np.array([1.0, 0.0, 0.0, 0.0]), std_normalize=False), [0.75, -0.25, -0.25, -0.25])


def test_step_wise_grpo_by_hand() -> None:
    # rewards 2 and 0: mean 1, unbiased std sqrt((1 + 1) / 1) = sqrt(2)
    score = 1.0 / (math.sqrt(2.0) + 1e-6)
    rewards_G, num_calls_G = np.array([2.0, 0.0]), np.array([4, 1])
    np.testing.assert_allclose(step_wise_grpo(rewards_G, num_calls_G), [score, -score], rtol=1e-14)
    np.testing.assert_allclose(step_wise_grpo(rewards_G, num_calls_G, step_norm=True), [score / 4, -score], rtol=1e-14)


def test_std_threshold_drops_groups_at_or_below_it() -> None:
    calls = np.array([1, 1])
    assert step_wise_grpo(np.array([1.0, 1.0]), calls, std_threshold=0.0) is None
    assert step_wise_grpo(np.array([1.0, 0.0]), calls, std_threshold=0.0) is not None
    std = reward_std(np.array([1.0, 0.0]))  # sqrt(0.5)
    assert std == pytest.approx(math.sqrt(0.5))
    assert step_wise_grpo(np.array([1.0, 0.0]), calls, std_threshold=std) is None


@given(st.floats(-1e3, 1e3), st.integers(2, 9))
def test_equal_rewards_have_advantages_of_exactly_zero(reward: float, size: int) -> None:
    assert (grpo(np.full(size, reward)) == 0.0).all()


@given(rewards)
def test_trap_16_advantages_of_a_group_have_zero_mean(values: list[float]) -> None:
    """Red when `_centred` subtracts nothing (or another group's mean)."""
    rewards_G = np.array(values)
    for normalize in (True, False):
        assert grpo(rewards_G, std_normalize=normalize).sum() == pytest.approx(0.0, abs=1e-9)


def test_trap_16_a_lone_rollout_has_no_advantage() -> None:
    """Red when `_centred` lets one reward through: the spec's engine scores it with mean 0, std 1."""
    with pytest.raises(ValueError, match="two rollouts or more"):
        grpo(np.array([1.0]))


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        grpo(np.array([1.0, float("nan")]))


@given(rewards, st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_advantages(values: list[float], random: Random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    rewards_G = np.array(values)
    np.testing.assert_allclose(grpo(rewards_G[order]), grpo(rewards_G)[order], atol=1e-9)


@given(rewards, st.integers(-64, 64))
def test_shifting_rewards_changes_nothing(values: list[float], shift: int) -> None:
    rewards_G = np.array(values)
    np.testing.assert_allclose(grpo(rewards_G + shift), grpo(rewards_G), atol=1e-9)


@given(rewards, st.floats(0.5, 100.0))
def test_scaling_rewards_changes_nothing_when_normalized_and_scales_otherwise(
    values: list[float], scale: float
) -> None:
    rewards_G = np.array(values)
    np.testing.assert_allclose(grpo(rewards_G * scale), grpo(rewards_G), atol=2e-4)  # up to the epsilon
    plain = grpo(rewards_G, std_normalize=False)
    np.testing.assert_allclose(grpo(rewards_G * scale, std_normalize=False), plain * scale, atol=1e-9)


@given(rewards)
def test_duplicating_a_group_keeps_its_centred_advantages(values: list[float]) -> None:
    rewards_G = np.array(values)
    twice = grpo(np.concatenate([rewards_G, rewards_G]), std_normalize=False)
    np.testing.assert_allclose(twice, np.tile(grpo(rewards_G, std_normalize=False), 2), atol=1e-9)
