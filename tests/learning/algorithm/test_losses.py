"""Per-token losses, KL estimators and entropy by hand, in fp64."""

import math
from typing import Any

import pytest
import torch

from sharpen.learning.algorithm import losses
from sharpen.learning.algorithm.kl import absolute, corrected_k3, estimator, k1, k2, k3, low_var_kl
from sharpen.learning.algorithm.losses import POLICY_LOSSES, entropy, ppo_clip


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


def grad(name: str, logprobs: list[float], old: list[float], advantages: list[float], **parameters: Any) -> list[float]:
    """Gradient of the summed loss with respect to the logprobs; tokens 0, 1 are one call, the rest another."""
    now = tensor(*logprobs).requires_grad_()
    loss = POLICY_LOSSES[name]
    calls = (torch.tensor([0, 0, *[1] * (len(logprobs) - 2)]),) if loss.by_call else ()
    values, _ = loss.function(now, tensor(*old), tensor(*advantages), *calls, **parameters)
    values.sum().backward()
    assert now.grad is not None
    found: list[float] = now.grad.tolist()
    return found


RATIOS = [1.0, 2.0, 0.5, 2.0, 0.5]
A = [2.0, 2.0, 2.0, -2.0, -2.0]
SIGMOID = {ratio: 1 / (1 + math.exp(-(ratio - 1))) for ratio in (1.0, 2.0, 0.5)}  # of tau 1, for positive advantages
SIGMOID_NEG = {ratio: 1 / (1 + math.exp(-1.05 * (ratio - 1))) for ratio in (2.0, 0.5)}
GRADIENTS = {
    # -clamp(ratio, 0, 1.28) A
    "cispo": [-2.0, -2.56, -1.0, 2.56, 1.0],
    # -4 s (1 - s) ratio A
    "sapo": [
        *(-4 * SIGMOID[r] * (1 - SIGMOID[r]) * r * 2 for r in (1.0, 2.0, 0.5)),
        *(4 * SIGMOID_NEG[r] * (1 - SIGMOID_NEG[r]) * r * 2 for r in (2.0, 0.5)),
    ],
    # -4 / tau s A
    "sapo_gate": [
        *(-4 * SIGMOID[r] * 2 for r in (1.0, 2.0, 0.5)),
        *(4 / 1.05 * SIGMOID_NEG[r] * 2 for r in (2.0, 0.5)),
    ],
    # weight 1 for A > 0, min(ratio, 1) else
    "topr": [-2.0, -2.0, -2.0, 2.0, 1.0],
    "opmd": [-1.0, -1.0, -1.0, 1.0, 1.0],
    "reinforce": [-2.0, -2.0, -2.0, 2.0, 2.0],
    "sft": [-2.0, -2.0, -2.0, 2.0, 2.0],
    "importance_sampling": [-2.0, -4.0, -1.0, 4.0, 1.0],
    "m2po": [-2.0, -4.0, -1.0, 4.0, 1.0],
    # from e^-3 = 0.05 to half or twice of it: no move reaches 0.15, and the divergence is 0.01 to 0.02
    "dppo_tv": [-2.0, -4.0, -1.0, 4.0, 1.0],
    "dppo_kl": [-2.0, -4.0, -1.0, 4.0, 1.0],
    # calls with W = 1 * 2 and 0.5 * 2 * 0.5: W² e^(3 (1 - W)) for A > 0, W³ e^(2 (1 - W)) for A < 0
    "vespo": [*[-2 * 4 * math.exp(-3)] * 2, -2 * 0.25 * math.exp(1.5), *[2 * 0.125 * math.exp(1.0)] * 2],
    # inside 1 / 1.3 .. 1.3 only
    "sppo": [-2.0, 0.0, 0.0, 0.0, 0.0],
    # one side: 2.0 with A > 0 and 0.5 with A < 0 are out
    "rec": [-2.0, 0.0, -2.0, 2.0, 0.0],
    "ppo": [-2.0, 0.0, -1.0, 4.0, 0.0],
    # calls (1, 2) and (0.5, 2, 0.5): geometric means sqrt(2) > 1.0004, clipped for A > 0; 0.5^(1/3) < 1 - 0.0003,
    # clipped for A < 0 and alive for A > 0
    "gspo": [0.0, 0.0, -2 * 0.5 ** (1 / 3), 0.0, 0.0],
}


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_gradient_of_each_policy_loss_by_hand(name: str) -> None:
    old = [-3.0] * 5
    now = [-3.0 + math.log(ratio) for ratio in RATIOS]
    assert grad(name, now, old, A) == pytest.approx(GRADIENTS[name], abs=1e-12)


def test_further_modes_by_hand() -> None:
    old, now = [-3.0] * 5, [-3.0 + math.log(ratio) for ratio in RATIOS]
    assert grad("rec", now, old, A, clip="two-side") == pytest.approx([-2.0, 0, 0, 0, 0])
    assert grad("rec", now, old, A, clip="none", importance=True) == pytest.approx([-2.0, -4.0, -1.0, 4.0, 1.0])
    assert grad("topr", now, old, A, threshold=3.0) == pytest.approx([-2.0, -2.0, -1.0, 2.0, 1.0])


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    """At ratio 1 the gradient is -A, for opmd divided by 1 + tau, for Trinity's sapo times 2 / tau."""
    slope = {"opmd": lambda a: 0.5, "sapo_gate": lambda a: 2.0 if a > 0 else 2.0 / 1.05}.get(name, lambda a: 1.0)
    expected = [-advantage * slope(advantage) for advantage in A]
    assert grad(name, [-1.0, -2.0, -0.5, -3.0, -0.1], [-1.0, -2.0, -0.5, -3.0, -0.1], A) == pytest.approx(expected)


def test_call_log_ratio_by_hand() -> None:
    now, old = tensor(-1.0, -2.0, -4.0), tensor(-2.0, -5.0, -3.0)
    found = losses.call_log_ratio(now, old, torch.tensor([1, 1, 0]))
    assert found.tolist() == [2.0, 2.0, -1.0]  # (1 + 3) / 2 and -1


def test_a_huge_ratio_stays_finite() -> None:
    loss, _ = ppo_clip(tensor(0.0), tensor(-1e6), tensor(-1.0), clip_low=0.2, clip_high=0.2)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(k3(tensor(-1e6), tensor(0.0))).all()


def test_the_gradient_of_m2po_goes_on_beyond_the_bound_of_its_value() -> None:
    now = tensor(1.0).requires_grad_()
    loss, _ = POLICY_LOSSES["m2po"].function(now, tensor(-29.0), tensor(-1.0))
    assert loss.item() == pytest.approx(math.exp(20.0))
    loss.sum().backward()
    assert now.grad is not None
    assert now.grad.item() == pytest.approx(math.exp(20.0))


def test_kl_estimators_by_hand() -> None:
    now, other = tensor(math.log(0.5), math.log(0.1)), tensor(math.log(0.25), math.log(0.4))
    torch.testing.assert_close(k1(now, other, now), tensor(math.log(2), -math.log(4)))
    torch.testing.assert_close(k2(now, other, now), tensor(math.log(2) ** 2 / 2, math.log(4) ** 2 / 2))
    third = (0.5 - 1 + math.log(2), 4 - 1 - math.log(4))
    torch.testing.assert_close(k3(now, other), tensor(*third))
    torch.testing.assert_close(absolute(now, other, now), tensor(math.log(2), math.log(4)))
    torch.testing.assert_close(low_var_kl(now, other, now), tensor(*third))
    assert float(low_var_kl(tensor(0.0), tensor(5.0), tensor(0.0))) == 10.0  # e^5 - 1 - 5 is 142
    old = tensor(math.log(0.25), math.log(0.2))  # ratios 2 and 0.5
    torch.testing.assert_close(corrected_k3(now, other, old), tensor(2 * third[0], 0.5 * third[1]))


def test_kl_estimators_have_the_divergence_as_their_mean_or_gradient() -> None:
    """Summed over the whole vocabulary: k1 and k3 give KL(p || q); the gradient of k2 is that of KL(p || q)."""
    logits = tensor(0.3, -1.0, 0.8).requires_grad_()
    other = torch.log_softmax(tensor(0.0, 0.5, -0.5), 0)
    now = torch.log_softmax(logits, 0)
    divergence = (now.exp() * (now - other)).sum()
    for name in ("k1", "k3", "corrected_k3"):
        torch.testing.assert_close((now.exp() * estimator(name)(now, other, now.detach())).sum(), divergence)
    weights = now.exp().detach()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (found,) = torch.autograd.grad((weights * k2(now, other, now)).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -math.inf, -math.inf]], dtype=torch.float64)
    expected = [math.log(4), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert entropy(logits).tolist() == pytest.approx(expected)
