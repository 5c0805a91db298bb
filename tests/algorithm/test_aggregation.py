"""Aggregation modes: closed-form weights and gradients."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agenttune.algorithm.aggregation import AGGREGATIONS, token_weights
from agenttune.algorithm.losses import ppo_clip

# Rollout 0 has call 0 (1 token) and call 1 (3 tokens); rollout 1 has call 2 (2 tokens).
ROLLOUTS = np.array([0, 0, 0, 0, 1, 1])
CALLS = np.array([0, 1, 1, 1, 2, 2])
EXPECTED = {
    "token-mean": [1 / 6] * 6,
    "sequence-mean-token-mean": [1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6],
    "sequence-mean-token-sum": [1 / 3] * 6,
    "rollout-mean": [1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4],
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_trap_18_gradient_of_each_aggregation_mode(mode: str) -> None:
    """On policy a token's loss has gradient -A, so the batch has -weight * A. Red when two modes are swapped."""
    advantages = torch.tensor([2.0, 2.0, 2.0, 2.0, -1.0, -1.0], dtype=torch.float64)
    logprobs = torch.full((6,), -1.5, dtype=torch.float64, requires_grad=True)
    loss, _ = ppo_clip(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    (torch.from_numpy(token_weights(mode, ROLLOUTS, CALLS)) * loss).sum().backward()
    expected = [-weight * a for weight, a in zip(EXPECTED[mode], [2.0, 2.0, 2.0, 2.0, -1.0, -1.0], strict=True)]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-15)


def test_expected_covers_every_mode() -> None:
    assert set(EXPECTED) == set(AGGREGATIONS)


calls_of_rollouts = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=5)


def layout(sizes: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token arrays for rollouts given as lists of call sizes."""
    lengths = [(rollout, length) for rollout, calls in enumerate(sizes) for length in calls]
    tokens = [length for _, length in lengths]
    return np.repeat([rollout for rollout, _ in lengths], tokens), np.repeat(np.arange(len(lengths)), tokens)


@given(calls_of_rollouts)
def test_trap_17_rollout_mean_gives_each_rollout_the_same_weight(sizes: list[list[int]]) -> None:
    """Red when `rollout_mean` averages over calls."""
    rollouts, calls = layout(sizes)
    weights = token_weights("rollout-mean", rollouts, calls)
    np.testing.assert_allclose(np.bincount(rollouts, weights), 1 / len(sizes))


@given(calls_of_rollouts, st.randoms(use_true_random=False))
def test_weights_follow_their_tokens_under_permutation(sizes: list[list[int]], random: Random) -> None:
    rollouts, calls = layout(sizes)
    order = list(range(len(calls)))
    random.shuffle(order)
    for mode in AGGREGATIONS:
        np.testing.assert_allclose(
            token_weights(mode, rollouts[order], calls[order]), token_weights(mode, rollouts, calls)[order]
        )


@given(calls_of_rollouts)
def test_duplicating_the_update_halves_each_weight(sizes: list[list[int]]) -> None:
    rollouts, calls = layout(sizes)
    twice = layout(sizes + sizes)
    for mode in AGGREGATIONS:
        np.testing.assert_allclose(token_weights(mode, *twice), np.tile(token_weights(mode, rollouts, calls) / 2, 2))


@given(calls_of_rollouts)
def test_means_have_weights_that_sum_to_one(sizes: list[list[int]]) -> None:
    for mode in ("token-mean", "sequence-mean-token-mean", "rollout-mean"):
        assert token_weights(mode, *layout(sizes)).sum() == pytest.approx(1.0)


def test_an_update_without_tokens_has_no_weights() -> None:
    empty = np.array([], dtype=np.int64)
    for mode in AGGREGATIONS:
        assert len(token_weights(mode, empty, empty)) == 0


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="got 1 and 2"):
        token_weights("token-mean", np.array([0]), np.array([0, 1]))
