"""Per-token losses, KL estimators and entropy by hand, in fp64."""

import math

import pytest
import torch

from agenttune.algorithm.kl import k1, k2, k3
from agenttune.algorithm.losses import entropy, ppo_clip


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*ratios: float) -> torch.Tensor:
    return tensor(*(math.log(ratio) for ratio in ratios)).requires_grad_()


def test_ppo_clip_by_hand() -> None:
    ratios = logs(1.0, 1.5, 0.5, 1.5, 0.5)
    advantages = tensor(2.0, 2.0, 2.0, -2.0, -2.0)
    loss, clipped = ppo_clip(ratios, torch.zeros(5, dtype=torch.float64), advantages, clip_low=0.2, clip_high=0.28)
    # A > 0: -2 * min(ratio, 1.28); A < 0: 2 * max(ratio, 0.8)
    torch.testing.assert_close(loss, tensor(-2.0, -2.56, -1.0, 3.0, 1.6))
    assert clipped.tolist() == [False, True, False, False, True]
    loss.sum().backward()
    # d loss / d logprob = -A * ratio, or 0 where clipped
    torch.testing.assert_close(ratios.grad, tensor(-2.0, 0.0, -1.0, 3.0, 0.0))


def test_dual_clip_by_hand() -> None:
    ratios = logs(5.0, 2.0, 5.0)
    advantages = tensor(-1.0, -1.0, 1.0)
    loss, clipped = ppo_clip(
        ratios, torch.zeros(3, dtype=torch.float64), advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    torch.testing.assert_close(loss, tensor(3.0, 2.0, -1.2))
    assert clipped.tolist() == [True, False, True]
    loss.sum().backward()
    torch.testing.assert_close(ratios.grad, tensor(0.0, 2.0, 0.0))


def test_a_huge_ratio_stays_finite() -> None:
    loss, _ = ppo_clip(tensor(0.0), tensor(-1e6), tensor(-1.0), clip_low=0.2, clip_high=0.2)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(k3(tensor(-1e6), tensor(0.0))).all()


def test_kl_estimators_by_hand() -> None:
    now, other = tensor(math.log(0.5), math.log(0.1)), tensor(math.log(0.25), math.log(0.4))
    torch.testing.assert_close(k1(now, other), tensor(math.log(2), -math.log(4)))
    torch.testing.assert_close(k2(now, other), tensor(math.log(2) ** 2 / 2, math.log(4) ** 2 / 2))
    torch.testing.assert_close(k3(now, other), tensor(0.5 - 1 + math.log(2), 4 - 1 - math.log(4)))


def test_kl_estimators_have_the_divergence_as_their_mean_or_gradient() -> None:
    """Summed over the whole vocabulary: k1 and k3 give KL(p || q); the gradient of k2 is that of KL(p || q)."""
    logits = tensor(0.3, -1.0, 0.8).requires_grad_()
    other = torch.log_softmax(tensor(0.0, 0.5, -0.5), 0)
    now = torch.log_softmax(logits, 0)
    divergence = (now.exp() * (now - other)).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((now.exp() * estimator(now, other)).sum(), divergence)
    weights = now.exp().detach()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (found,) = torch.autograd.grad((weights * k2(now, other)).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -math.inf, -math.inf]], dtype=torch.float64)
    expected = [math.log(4), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert entropy(logits).tolist() == pytest.approx(expected)
