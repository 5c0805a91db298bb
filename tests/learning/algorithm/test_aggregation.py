"""Aggregation modes: closed-form weights and gradients."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import AGGREGATIONS
from sharpen.learning.algorithm.advantages import grpo
from sharpen.learning.algorithm.aggregation import token_weights
from sharpen.learning.algorithm.losses import ppo_clip
from sharpen.learning.algorithm.returns import Scores

# Rollout 0 has call 0 (1 token) and call 1 (3 tokens); rollout 1 has call 2 (2 tokens).
ROLLOUTS = np.array([0, 0, 0, 0, 1, 1])
CALLS = np.array([0, 1, 1, 1, 2, 2])
EXPECTED = {
    "token-mean": [1 / 6] * 6,
    "sequence-mean-token-mean": [1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6],
    "sequence-mean-token-sum": [1 / 3] * 6,
    "rollout-mean": [1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4],
    "constant-length": [1 / 20] * 6,  # of length 10
}
MODES = AGGREGATIONS


def weigh(mode: str, rollouts: np.ndarray, calls: np.ndarray) -> np.ndarray:
    return token_weights(mode, rollouts, calls, length=10)


@pytest.mark.parametrize("mode", EXPECTED)
def test_trap_18_gradient_of_each_aggregation_mode(mode: str) -> None:
    """On policy a token's loss has gradient -A, so the batch has -weight * A. Red when two modes are swapped."""
    advantages = torch.tensor([2.0, 2.0, 2.0, 2.0, -1.0, -1.0], dtype=torch.float64)
    logprobs = torch.full((6,), -1.5, dtype=torch.float64, requires_grad=True)
    loss, _ = ppo_clip(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    (torch.from_numpy(weigh(mode, ROLLOUTS, CALLS)) * loss).sum().backward()
    expected = [-weight * a for weight, a in zip(EXPECTED[mode], [2.0, 2.0, 2.0, 2.0, -1.0, -1.0], strict=True)]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-15)


def test_expected_covers_every_mode() -> None:
    assert set(EXPECTED) == set(MODES)


# Two rollouts of one group in one call each: one token with reward 1, four tokens with reward 0. Without the division
# the advantages are 1/2 and -1/2; the deviation is sqrt(1/2), so with it they are 1/sqrt(2) and -1/sqrt(2).
PULLS = {
    "token-mean": (1 / 5, 4 / 5),  # the long one pulls four times as hard
    "sequence-mean-token-mean": (1 / 2, 1 / 2),  # the same pull, so each token of the long one a quarter
    "sequence-mean-token-sum": (1 / 2, 4 / 2),
    "rollout-mean": (1 / 2, 1 / 2),
    "constant-length": (1 / 20, 4 / 20),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spread", [1.0, 0.01])
def test_trap_18_length_and_std_bias_in_closed_form(mode: str, spread: float) -> None:
    """How hard a right and a wrong rollout pull, by their lengths and by the group's spread: only with the division a
    group with a hundredth of the spread pulls as hard. Red when two modes are swapped, when `grpo` divides without
    being asked, or when "constant-length" divides by the rollout's own length."""
    rollouts = np.array([0, 1, 1, 1, 1])
    scores = Scores.of_rollouts([spread, 0.0])
    for std_normalize, size in ((False, spread / 2), (True, 1 / np.sqrt(2) / (1 + 1e-6 * np.sqrt(2) / spread))):
        advantages = torch.from_numpy(grpo(scores, std_normalize=std_normalize)[rollouts])
        logprobs = torch.full((5,), -1.5, dtype=torch.float64, requires_grad=True)
        loss, _ = ppo_clip(logprobs, logprobs.detach(), advantages)
        (torch.from_numpy(weigh(mode, rollouts, rollouts)) * loss).sum().backward()
        assert logprobs.grad is not None
        pulls = np.bincount(rollouts, logprobs.grad.numpy())
        np.testing.assert_allclose(pulls, [-PULLS[mode][0] * size, PULLS[mode][1] * size], rtol=1e-12)


def plain_weights(mode: str, rollouts: list[int], calls: list[int]) -> list[float]:
    """By counting, token by token."""
    result = []
    for rollout, call in zip(rollouts, calls, strict=True):
        num_calls, num_rollouts = len(set(calls)), len(set(rollouts))
        result.append(
            {
                "token-mean": 1 / len(calls),
                "sequence-mean-token-mean": 1 / num_calls / calls.count(call),
                "sequence-mean-token-sum": 1 / num_calls,
                "rollout-mean": 1 / num_rollouts / rollouts.count(rollout),
                "constant-length": 1 / num_rollouts / 10,
            }[mode]
        )
    return result


calls_of_rollouts = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=5)


def layout(sizes: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token arrays for rollouts given as lists of call sizes."""
    lengths = [(rollout, length) for rollout, calls in enumerate(sizes) for length in calls]
    tokens = [length for _, length in lengths]
    return np.repeat([rollout for rollout, _ in lengths], tokens), np.repeat(np.arange(len(lengths)), tokens)


@given(calls_of_rollouts)
def test_trap_17_rollout_mean_gives_each_rollout_the_same_weight(sizes: list[list[int]]) -> None:
    """Red when "rollout-mean" averages over calls."""
    rollouts, calls = layout(sizes)
    weights = token_weights("rollout-mean", rollouts, calls)
    np.testing.assert_allclose(np.bincount(rollouts, weights), 1 / len(sizes))


@given(calls_of_rollouts, st.randoms(use_true_random=False))
def test_weights_follow_their_tokens_and_equal_a_plain_implementation(sizes: list[list[int]], random: Random) -> None:
    rollouts, calls = layout(sizes)
    order = list(range(len(calls)))
    random.shuffle(order)
    for mode in MODES:
        np.testing.assert_allclose(weigh(mode, rollouts[order], calls[order]), weigh(mode, rollouts, calls)[order])
        np.testing.assert_allclose(weigh(mode, rollouts, calls), plain_weights(mode, rollouts.tolist(), calls.tolist()))


@given(calls_of_rollouts)
def test_duplicating_the_update_halves_each_weight(sizes: list[list[int]]) -> None:
    rollouts, calls = layout(sizes)
    twice = layout(sizes + sizes)
    for mode in MODES:
        np.testing.assert_allclose(weigh(mode, *twice), np.tile(weigh(mode, rollouts, calls) / 2, 2))


@given(calls_of_rollouts)
def test_means_have_weights_that_sum_to_one(sizes: list[list[int]]) -> None:
    for mode in ("token-mean", "sequence-mean-token-mean", "rollout-mean"):
        assert token_weights(mode, *layout(sizes)).sum() == pytest.approx(1.0)


def test_an_update_without_tokens_has_no_weights() -> None:
    empty = np.array([], dtype=np.int64)
    for mode in MODES:
        assert len(weigh(mode, empty, empty)) == 0


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="got 1 and 2"):
        token_weights("token-mean", np.array([0]), np.array([0, 1]))
    with pytest.raises(ValueError, match="needs the length"):
        token_weights("constant-length", np.array([0]), np.array([0]))
