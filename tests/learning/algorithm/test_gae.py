"""GAE by hand, against a plain double loop, and its properties; the critic's loss; KL charged to the end."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.config.run import LossConfig
from sharpen.learning.algorithm.gae import explained_variance, gae, sums_to_end, whitened
from sharpen.learning.algorithm.losses import value_loss
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.returns import Scores, rewards_after_calls

numbers = st.integers(-16, 16).map(lambda n: n / 4)
token = st.tuples(numbers, numbers)
rollouts = st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4)


def arrays(step: list[list[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, values and rollout numbers of a step's tokens."""
    rows = np.array([one for rollout in step for one in rollout], np.float64)
    return rows[:, 0], rows[:, 1], np.repeat(np.arange(len(step)), [len(rollout) for rollout in step])


def test_gae_by_hand() -> None:
    # One rollout of three tokens, reward 1 at the end, values 0.5, 0.25, 0.5; gamma 0.5, lambda 0.5.
    # delta: 0 + 0.5 * 0.25 - 0.5 = -0.375; 0 + 0.5 * 0.5 - 0.25 = 0; 1 + 0 - 0.5 = 0.5
    # A_3 = 0.5; A_2 = 0 + 0.25 * 0.5 = 0.125; A_1 = -0.375 + 0.25 * 0.125 = -0.34375
    advantages, returns = gae(
        np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.25, 0.5]), np.zeros(3, np.int64), gamma=0.5, lam=0.5, whiten=False
    )
    assert advantages.tolist() == [-0.34375, 0.125, 0.5]
    assert returns.tolist() == [0.15625, 0.375, 1.0]


def test_whitened_by_hand() -> None:
    # 1, 2, 3: mean 2, population variance 2/3
    np.testing.assert_allclose(whitened(np.array([1.0, 2.0, 3.0])), np.array([-1, 0, 1]) / np.sqrt(2 / 3 + 1e-8))
    assert whitened(np.full(3, 0.1)).tolist() == [0.0, 0.0, 0.0]
    assert whitened(np.zeros(0)).tolist() == []


def test_rewards_of_calls_chain_over_the_calls_of_a_rollout() -> None:
    """Two calls, the workflow's reward at the end of the second; the first call's last token sees the next call."""
    scores = Scores.of_rollouts([2.0, 1.0], num_calls=[2, 1])
    assert rewards_after_calls(scores).tolist() == [0.0, 2.0, 1.0]
    # tokens: call 0 has two, call 1 one, then the other rollout's one; values 0, gamma = lambda = 1
    advantages, _ = gae(
        np.array([0.0, 0.0, 2.0, 1.0]), np.zeros(4), np.array([0, 0, 0, 1]), gamma=1.0, lam=1.0, whiten=False
    )
    assert advantages.tolist() == [2.0, 2.0, 2.0, 1.0]


def plain_gae(step: list[list[tuple[float, float]]], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """By the definition: the sum of (gamma lambda)^k delta_(t+k) over the rest of the rollout."""
    advantages, returns = [], []
    for rollout in step:
        for t in range(len(rollout)):
            total = 0.0
            for k in range(t, len(rollout)):
                following = rollout[k + 1][1] if k + 1 < len(rollout) else 0.0
                total += (gamma * lam) ** (k - t) * (rollout[k][0] + gamma * following - rollout[k][1])
            advantages.append(total)
            returns.append(total + rollout[t][1])
    return advantages, returns


@given(rollouts, st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_gae_equals_a_plain_implementation(step: list[list[tuple[float, float]]], gamma: float, lam: float) -> None:
    advantages, returns = gae(*arrays(step), gamma=gamma, lam=lam, whiten=False)
    expected = plain_gae(step, gamma, lam)
    np.testing.assert_allclose(advantages, expected[0], atol=1e-9)
    np.testing.assert_allclose(returns, expected[1], atol=1e-9)


@given(rollouts, st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(step: list[list[tuple[float, float]]], random) -> None:
    order = list(range(len(step)))
    random.shuffle(order)
    lengths = np.cumsum([0, *(len(rollout) for rollout in step)])
    places = np.concatenate([np.arange(lengths[n], lengths[n + 1]) for n in order])
    for found, shuffled in zip(gae(*arrays(step)), gae(*arrays([step[n] for n in order])), strict=True):
        np.testing.assert_allclose(shuffled, found[places], atol=1e-9)


@given(rollouts, st.floats(0.1, 10.0))
def test_whitened_advantages_do_not_see_the_scale(step: list[list[tuple[float, float]]], scale: float) -> None:
    rewards, values, numbers_S = arrays(step)
    raw, _ = gae(rewards, values, numbers_S, whiten=False)
    found, _ = gae(rewards, values, numbers_S)
    scaled, _ = gae(rewards * scale, values * scale, numbers_S)
    if raw.std() * min(1.0, scale) > 0.01:  # below, the floor under the variance (1e-8) is seen
        np.testing.assert_allclose(scaled, found, atol=1e-3)
    assert found.mean() == pytest.approx(0.0, abs=1e-9)


@given(rollouts)
def test_lambda_one_is_the_return_minus_the_value_and_lambda_zero_one_step(
    step: list[list[tuple[float, float]]],
) -> None:
    rewards, values, numbers_S = arrays(step)
    advantages, returns = gae(rewards, values, numbers_S, lam=1.0, whiten=False)
    np.testing.assert_allclose(returns, sums_to_end(rewards, numbers_S), atol=1e-9)
    np.testing.assert_allclose(advantages, sums_to_end(rewards, numbers_S) - values, atol=1e-9)
    one_step, _ = gae(rewards, values, numbers_S, lam=0.0, whiten=False)
    following = np.array([r[t + 1][1] if t + 1 < len(r) else 0.0 for r in step for t in range(len(r))])
    np.testing.assert_allclose(one_step, rewards + following - values, atol=1e-9)


def test_mismatched_or_non_finite_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2, 1, 2"):
        gae(np.zeros(2), np.zeros(1), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="finite"):
        gae(np.array([np.nan]), np.zeros(1), np.zeros(1, np.int64))


def test_value_loss_by_hand() -> None:
    # old 1, clip 0.2, return 2. New 1.5: (0.5)^2 against bounded 1.2: (0.8)^2, so 0.64 / 2, held.
    # New 1.1: 0.9^2 = 0.81 / 2, not held. Return 0, new 0.5: 0.25 against bounded 0.8: 0.64 / 2, held.
    new = torch.tensor([1.5, 1.1, 0.5], dtype=torch.float64, requires_grad=True)
    loss, clipped = value_loss(new, torch.ones(3).double(), torch.tensor([2.0, 2.0, 0.0]).double())
    assert loss.tolist() == pytest.approx([0.32, 0.405, 0.32])
    assert clipped.tolist() == [True, False, True]
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, -0.9, 0.0])
    plain, none = value_loss(new, torch.ones(3).double(), torch.tensor([2.0, 2.0, 0.0]).double(), clip=None)
    assert plain.tolist() == pytest.approx([0.125, 0.405, 0.125])
    assert not none.any()


@settings(max_examples=30)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8), st.floats(0.05, 2.0))
def test_value_loss_equals_a_plain_implementation(rows: list[tuple[float, float, float]], clip: float) -> None:
    now, old, returns = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    expected = []
    for v, before, target in rows:
        bounded = before + max(-clip, min(clip, v - before))
        expected.append(max((v - target) ** 2, (bounded - target) ** 2) / 2)
    assert value_loss(now, old, returns, clip=clip)[0].tolist() == pytest.approx(expected)


def test_explained_variance_by_hand() -> None:
    returns = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.zeros(4), returns) == 0.0
    assert explained_variance(returns / 2, returns) == 0.75  # what is left over has half the deviation
    assert np.isnan(explained_variance(np.arange(3.0), np.ones(3)))


def test_ppo_has_its_published_parts_and_they_can_be_set() -> None:
    algorithm = resolve("ppo", LossConfig(), 1)
    assert algorithm.needs_critic
    assert algorithm.trains_zero_advantages
    assert not algorithm.group_relative
    rewards, values, numbers_S = np.array([0.0, 1.0]), np.array([0.5, 0.5]), np.zeros(2, np.int64)
    found, _ = algorithm.token_advantages(rewards, values, numbers_S)
    np.testing.assert_allclose(found, gae(rewards, values, numbers_S, gamma=1.0, lam=0.95)[0])
    other = resolve("ppo", LossConfig(advantage_args={"lam": 1.0, "whiten": False}), 1)
    # lambda 1: the return 1 minus the value 0.5, for both tokens
    assert other.token_advantages(rewards, values, numbers_S)[0].tolist() == [0.5, 0.5]
