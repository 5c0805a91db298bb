"""DPPO's masks and VESPO's weight by hand, against other teams' numbers, and against the certificate's own formula."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sharpen.config.run import LossConfig
from sharpen.evidence.certificate.plain.losses import POLICY_LOSSES as SECOND
from sharpen.learning.algorithm.losses import POLICY_LOSSES, dppo_kl, dppo_tv, vespo
from sharpen.learning.algorithm.resolve import resolve


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*probabilities: float) -> torch.Tensor:
    return tensor(*(math.log(one) for one in probabilities)).requires_grad_()


def test_dppo_by_total_variation_by_hand() -> None:
    """Up by 0.2 and down by 0.2, pushed on or back; 0.005 to 0.15, a ratio of 30 limited to 20; a move of 0.1."""
    now, old = logs(0.7, 0.7, 0.3, 0.3, 0.15, 0.6), logs(0.5, 0.5, 0.5, 0.5, 0.005, 0.5).detach()
    loss, clipped = dppo_tv(now, old, tensor(2, -2, 2, -2, 2, 2))
    assert clipped.tolist() == [True, False, False, True, False, False]
    loss.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0, 2 * 1.4, -2 * 0.6, 0, -2 * 20, -2 * 1.2])
    assert loss.tolist()[5] == pytest.approx(-2 * 1.2 * math.log(0.6))


def test_dppo_by_kl_by_hand() -> None:
    """KL of (0.5, 0.5) to (0.7, 0.3) is 0.0872, to (0.6, 0.4) 0.0204; of (0.99, 0.01) to (0.96, 0.04) 0.0166."""
    now, old = logs(0.7, 0.7, 0.6, 0.3, 0.96), logs(0.5, 0.5, 0.5, 0.5, 0.99).detach()
    _, clipped = dppo_kl(now, old, tensor(1, -1, 1, -1, -1))
    assert clipped.tolist() == [True, False, False, True, False]
    assert dppo_kl(now, old, tensor(1, -1, 1, -1, -1), low=0.01, high=0.02)[1].tolist() == [True, False, *[True] * 3]


def test_a_token_that_has_become_certain_stays_finite() -> None:
    now = torch.zeros(2, requires_grad=True)
    loss, clipped = dppo_kl(now, torch.tensor([-0.01, 0.0]), torch.ones(2))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert clipped.tolist() == [True, False]


@pytest.mark.parametrize(
    ("now", "old", "advantage", "masked"),
    [(1.0, 0.5, 1.0, True), (1.0, 0.5, -1.0, False), (0.3, 0.8, -1.0, True), (0.3, 0.8, 1.0, False)],
)
def test_the_mask_of_prime_rl(now: float, old: float, advantage: float, masked: bool) -> None:
    """The four cases of the tests of its `default_loss_fn`, whose bounds are 0.2."""
    _, clipped = dppo_tv(logs(now), logs(old).detach(), tensor(advantage), low=0.2, high=0.2)
    assert clipped.tolist() == [masked]


def test_the_gradient_of_prime_rl() -> None:
    """Of its test of a masked token beside another: loss -1.2, which is -ρ A; ours has the same gradient."""
    now = logs(1.0, 0.6)
    loss, _ = dppo_tv(now, logs(0.5, 0.5).detach(), tensor(1, 1), low=0.2, high=0.2)
    loss.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0.0, -1.2])


def test_the_weights_of_trl() -> None:
    """`GRPOTrainer.get_gamma_weights` of TRL 1.16.0 on these log ratios, with its defaults."""
    ratios = tensor(0, 0, 0.5, 0.2, -0.4, 0.1, 0.3, 0.3, -0.3, -0.6, 1, 1)
    theirs = [
        1.0,
        0.19373614511074147,
        1.1942822029876292,
        1.1685485220610616,
        0.22021755839376334,
        0.001138421986504149,
    ]
    now = (ratios - 3.0).requires_grad_()
    advantages = tensor(1, 1, 1, -1, -1, -1).repeat_interleave(2)
    loss, clipped = vespo(now, torch.full_like(ratios, -3.0), advantages, torch.arange(6).repeat_interleave(2))
    loss.sum().backward()
    assert now.grad is not None
    assert (-now.grad * advantages).tolist() == pytest.approx([one for one in theirs for _ in range(2)])
    assert not clipped.any()


def test_vespo_is_bounded_far_from_the_record() -> None:
    """W of e^20 and more has weight 0, which counts as clipped; W below 1e-8 has that of 1e-8: 1e-16 e^3."""
    now = tensor(0.0, -40.0).requires_grad_()
    loss, clipped = vespo(now, tensor(-40.0, 0.0), tensor(1.0, 1.0), torch.tensor([0, 1]))
    loss.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0.0, -1e-16 * math.exp(3 - 3e-8)])
    assert clipped.tolist() == [True, False]


logprob = st.floats(-4.0, -0.01)
TOKENS = st.lists(st.tuples(logprob, logprob, st.sampled_from([-2.0, 0.0, 1.5])), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("dppo_tv", {"low": 0.1, "high": 0.3, "max_ratio": 3.0}),
        ("dppo_kl", {"low": 0.02, "high": 0.1, "max_ratio": 3.0}),
        ("vespo", {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 2.0, "lambda_neg": 1.5}),
    ],
)
@given(tokens=TOKENS, usual=st.booleans())
def test_the_certificates_formula_has_the_same_gradient(
    name: str, parameters: dict[str, float], tokens: list[tuple[float, float, float]], usual: bool
) -> None:
    """Off the bounds, where rounding may decide."""
    now_E, old_E, advantages_E = (tensor(*column) for column in zip(*tokens, strict=True))
    given: dict[str, Any] = {} if usual else parameters
    loss, calls = POLICY_LOSSES[name], (torch.zeros(len(tokens), dtype=torch.int64),)
    for edge in (1 - 1e-9, 1 + 1e-9):
        moved = {key: value * edge if key in ("low", "high") else value for key, value in parameters.items()}
        arguments = () if not loss.by_call else calls
        kept = loss.function(now_E, old_E, advantages_E, *arguments, **moved)[1]
        assume((kept == loss.function(now_E, old_E, advantages_E, *arguments, **parameters)[1]).all())
    gradients = []
    for function, arguments in ((loss.function, calls if loss.by_call else ()), (SECOND[name], ())):
        leaf_E = now_E.clone().requires_grad_()
        found: Any = function(leaf_E, old_E, advantages_E, *arguments, **given)
        gradients += torch.autograd.grad((found[0] if isinstance(found, tuple) else found).sum(), leaf_E)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_the_presets() -> None:
    dppo, soft = resolve("dppo", LossConfig(), 4), resolve("vespo", LossConfig(), 4)
    assert (dppo.policy_loss, dppo.needs_reference, dppo.behaviour, dppo.by_call) == ("dppo_tv", False, "none", False)
    assert (soft.policy_loss, soft.needs_reference, soft.behaviour, soft.by_call) == ("vespo", False, "truncated", True)
    assert soft.aggregation == dppo.aggregation == "token-mean"
    given = LossConfig(policy_loss="dppo_kl", policy_loss_args={"high": 0.1})
    assert resolve("dppo", given, 4).policy_loss_args == {"high": 0.1}
