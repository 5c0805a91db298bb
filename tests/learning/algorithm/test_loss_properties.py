"""Every per-token loss, KL estimator and the entropy against plain implementations in fp64, and what they claim."""

import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sharpen.learning.algorithm.kl import ESTIMATORS, estimator
from sharpen.learning.algorithm.losses import POLICY_LOSSES, entropy
from sharpen.learning.algorithm.objective import policy_objective
from sharpen.learning.algorithm.presets import Algorithm

logprob = st.floats(-4.0, -0.01)
Token = tuple[float, float, float, int]
TOKENS = st.lists(
    st.tuples(logprob, logprob, st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.5]), st.integers(0, 2)), min_size=1, max_size=8
)
NAMES = sorted(POLICY_LOSSES)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def values_and_gradients(name: str, tokens: list[Token], **parameters: Any) -> tuple[list[float], list[float]]:
    now, old, advantages, calls = (list(column) for column in zip(*tokens, strict=True))
    now_E = tensor(now).requires_grad_()
    loss = POLICY_LOSSES[name]
    of_calls = (torch.tensor(calls).unique(return_inverse=True)[1],) if loss.by_call else ()
    losses_E, _ = loss.function(now_E, tensor(old), tensor(advantages), *of_calls, **parameters)
    losses_E.sum().backward()
    assert now_E.grad is not None
    return losses_E.tolist(), now_E.grad.tolist()


def of_clip(ratio: float, a: float, low: float, high: float, dual: float | None = None) -> tuple[float, float]:
    """Value, and gradient with respect to the logprob, of a clipped surrogate."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    surrogate = min(ratio * a, bounded * a)
    if dual is not None and a < 0 and surrogate < dual * a:
        return -dual * a, 0.0
    return -surrogate, -ratio * a if ratio * a <= bounded * a else 0.0


def binary_kl(old: float, now: float) -> float:
    return old * math.log(old / now) + (1 - old) * math.log((1 - old + 1e-8) / (1 - now + 1e-8))


def plain(name: str, tokens: list[Token]) -> list[tuple[float, float]]:
    """Value and gradient of each token by scalars, with each loss's default parameters."""
    result = []
    for now, old, a, call in tokens:
        ratio = math.exp(now - old)
        match name:
            case "ppo":
                result.append(of_clip(ratio, a, 0.2, 0.2))
            case "gspo":
                logs = [n - o for n, o, _, other in tokens if other == call]
                result.append(of_clip(math.exp(sum(logs) / len(logs)), a, 3e-4, 4e-4))
            case "importance_sampling" | "m2po":  # what m2po leaves out has advantage 0
                result.append((-ratio * a, -ratio * a))
            case "sapo":
                tau = 1.0 if a > 0 else 1.05
                gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
                result.append((-4 / tau * gate * a, -4 * gate * (1 - gate) * ratio * a))
            case "dppo_tv":
                up = math.exp(now) - math.exp(old)
                weight = 0.0 if (a > 0 and up > 0.15) or (a < 0 and up < -0.15) else min(ratio, 20.0)
                result.append((-weight * a * now, -weight * a))
            case "dppo_kl":
                up, weight = math.exp(now) - math.exp(old), min(ratio, 20.0)
                if a * up > 0 and binary_kl(math.exp(old), math.exp(now)) > 0.05:
                    weight = 0.0
                result.append((-weight * a * now, -weight * a))
            case "vespo":
                w = math.exp(sum(n - o for n, o, _, other in tokens if other == call))
                k, scale = (2, 3) if a >= 0 else (3, 2)
                weight = max(w, 1e-8) ** k * math.exp(scale * (1 - w))
                result.append((-weight * a * now, -weight * a))
            case "sppo":
                inside = 1 / 1.3 <= ratio <= 1.3
                result.append((-a * (now - old), -a) if inside else (0.0, 0.0))
            case _:
                weight = {
                    "cispo": min(ratio, 1.28),
                    "topr": 1.0 if a > 0 else min(ratio, 1.0),
                    "opmd": 0.5,
                    "sapo_gate": 4 / (tau := 1.0 if a > 0 else 1.05) / (1 + math.exp(-tau * (ratio - 1))),
                    "rec": 0.0 if (ratio > 1.2 and a > 0) or (ratio < 0.8 and a < 0) else 1.0,
                    "reinforce": 1.0,
                    "sft": 1.0,
                }[name]
                result.append((-weight * a * now, -weight * a))
    return result


def off_the_bounds(tokens: list[Token]) -> bool:
    """No ratio where a gradient jumps."""
    bounds = [0.8, 1.2, 1.28, 1.0, 1 / 1.3, 1.3, 1 - 3e-4, 1 + 4e-4]
    ratios = [math.exp(now - old) for now, old, _, _ in tokens]
    for now, old, _, _ in tokens:
        p, old_p = math.exp(now), math.exp(old)
        if abs(abs(p - old_p) - 0.15) < 1e-9 or abs(binary_kl(old_p, p) - 0.05) < 1e-9:
            return False
    for call in {token[3] for token in tokens}:
        logs = [now - old for now, old, _, other in tokens if other == call]
        ratios.append(math.exp(sum(logs) / len(logs)))
    return all(abs(ratio - bound) > 1e-9 for ratio in ratios for bound in bounds)


@pytest.mark.parametrize("name", NAMES)
@given(tokens=TOKENS)
def test_every_policy_loss_equals_a_plain_implementation(name: str, tokens: list[Token]) -> None:
    assume(off_the_bounds(tokens))
    found = values_and_gradients(name, tokens)
    for values, expected in zip(found, zip(*plain(name, tokens), strict=True), strict=True):
        assert values == pytest.approx(list(expected), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(tokens=TOKENS)
def test_clipped_are_the_tokens_without_a_gradient_whose_advantage_is_not_zero(name: str, tokens: list[Token]) -> None:
    """Log ratios up to 2: at 4 the gate of sapo is so flat that its slope is 0 in fp64."""
    tokens = [(now, (now + old) / 2, advantage, call) for now, old, advantage, call in tokens]
    assume(off_the_bounds(tokens))
    now, old, advantages, calls = (list(column) for column in zip(*tokens, strict=True))
    now_E = tensor(now).requires_grad_()
    algorithm = Algorithm(name="x", policy_loss=name, source="-")  # type: ignore[arg-type]
    calls_E = torch.tensor(calls).unique(return_inverse=True)[1]
    weights_E = torch.ones(len(now), dtype=torch.float64)
    loss, _, found = policy_objective(algorithm, now_E, tensor(old), tensor(advantages), weights_E, calls_E=calls_E)
    loss.backward()
    assert now_E.grad is not None
    pushed_E = tensor(advantages) != 0
    assert found.clipped_E[pushed_E].tolist() == (now_E.grad[pushed_E] == 0).tolist()
    assert found.log_ratios_E.tolist() == pytest.approx([n - o for n, o in zip(now, old, strict=True)])
    assert not found.log_ratios_E.requires_grad


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(tokens=TOKENS, scale=st.floats(0.1, 10.0), random=st.randoms(use_true_random=False))
def test_every_policy_loss_follows_its_tokens_and_is_linear_in_the_size_of_the_advantages(
    name: str, tokens: list[Token], scale: float, random: Random
) -> None:
    values, gradients = values_and_gradients(name, tokens)
    order = random.sample(range(len(tokens)), len(tokens))
    shuffled = values_and_gradients(name, [tokens[place] for place in order])
    assert shuffled[0] == pytest.approx([values[place] for place in order], abs=1e-12)
    assert shuffled[1] == pytest.approx([gradients[place] for place in order], abs=1e-12)
    scaled = values_and_gradients(name, [(now, old, a * scale, call) for now, old, a, call in tokens])
    assert scaled[0] == pytest.approx([value * scale for value in values], abs=1e-12)
    assert scaled[1] == pytest.approx([gradient * scale for gradient in gradients], abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(tokens=TOKENS, kl=st.sampled_from(sorted(ESTIMATORS)))
def test_trap_19_no_loss_depends_on_the_micro_batch_split_or_on_padding(
    name: str, tokens: list[Token], kl: str
) -> None:
    """Whole calls go to one micro-batch; padding are tokens of weight 0 in a call of their own. Red when
    `policy_objective` divides by its number of tokens, or `call_log_ratio` averages over all tokens it is given."""
    algorithm = Algorithm(name="x", policy_loss=name, kl=kl, kl_coef=0.3, source="-")
    weights = [1.0 / (place + 2) for place in range(len(tokens))]

    def gradient(parts: list[list[int]], padding: int) -> torch.Tensor:
        now_E = tensor(token[0] for token in tokens).requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            pads = [(-1.0, -3.0, 5.0, 3)] * padding
            rows = [tokens[place] for place in part] + pads
            loss, *_ = policy_objective(
                algorithm,
                torch.cat([now_E[part], tensor(pad[0] for pad in pads)]),
                tensor(row[1] for row in rows),
                tensor(row[2] for row in rows),
                tensor([weights[place] for place in part] + [0.0] * padding),
                ref_logprobs_E=tensor(row[1] - 0.5 for row in rows),
                calls_E=torch.tensor([row[3] for row in rows]).unique(return_inverse=True)[1],
            )
            total = total + loss
        return torch.autograd.grad(total, now_E)[0]

    whole = gradient([list(range(len(tokens)))], 0)
    calls = [[place for place, token in enumerate(tokens) if token[3] == call] for call in range(3)]
    torch.testing.assert_close(gradient([part for part in calls if part], 2), whole, rtol=1e-9, atol=1e-12)


def plain_kl(name: str, now: float, other: float, old: float) -> float:
    x = now - other
    k3 = math.exp(-x) - 1 + x
    return {
        "k1": x,
        "k2": x * x / 2,
        "k3": k3,
        "low_var_kl": min(k3, 10.0),
        "abs": abs(x),
        "corrected_k3": math.exp(now - old) * k3,
    }[name]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(st.lists(st.tuples(logprob, logprob, logprob), min_size=1, max_size=6))
def test_every_kl_estimator_equals_a_plain_implementation(name: str, rows: list[tuple[float, float, float]]) -> None:
    now, other, old = (tensor(column) for column in zip(*rows, strict=True))
    found = estimator(name)(now, other, old)
    assert found.tolist() == pytest.approx([plain_kl(name, *row) for row in rows], rel=1e-9, abs=1e-12)
    if name != "k1":
        assert (found >= -1e-12).all()
    assert estimator(name)(now, now, old).tolist() == pytest.approx([0.0] * len(rows), abs=1e-12)


def test_gradients_of_the_kl_estimators_by_hand() -> None:
    """Policy 0.5 and 0.1, reference 0.25 and 0.4, sampled at 0.25 and 0.2: x is log 2 and -log 4."""
    expected = {
        "k1": [1.0, 1.0],
        "k2": [math.log(2), -math.log(4)],  # x
        "k3": [0.5, -3.0],  # 1 - exp(-x)
        "low_var_kl": [0.5, -3.0],
        "abs": [1.0, -1.0],
        # ratio (k3 + 1 - exp(-x)) = ratio x: 2 log 2 and -0.5 log 4
        "corrected_k3": [2 * math.log(2), -0.5 * math.log(4)],
    }
    assert expected.keys() == ESTIMATORS.keys()
    for name, gradients in expected.items():
        now = tensor([math.log(0.5), math.log(0.1)]).requires_grad_()
        found = estimator(name)(now, tensor([math.log(0.25), math.log(0.4)]), tensor([math.log(0.25), math.log(0.2)]))
        (gradient,) = torch.autograd.grad(found.sum(), now)
        assert gradient.tolist() == pytest.approx(gradients), name


def test_a_bounded_estimator_has_no_gradient_beyond_its_bound() -> None:
    now = tensor([-6.0]).requires_grad_()
    (gradient,) = torch.autograd.grad(estimator("low_var_kl")(now, tensor([-1.0]), now.detach()).sum(), now)
    assert gradient.tolist() == [0.0]


LOGITS = st.lists(st.floats(-4.0, 4.0), min_size=3, max_size=3)


@given(LOGITS, LOGITS, LOGITS)
def test_corrected_k3_is_unbiased_off_policy_in_value_and_gradient(
    logits: list[float], other: list[float], old: list[float]
) -> None:
    """The mean over what the old policy samples is the divergence itself, and so is its gradient."""
    logits_V = tensor(logits).requires_grad_()
    now_V = torch.log_softmax(logits_V, 0)
    other_V, old_V = torch.log_softmax(tensor(other), 0), torch.log_softmax(tensor(old), 0)
    divergence = (now_V.exp() * (now_V - other_V)).sum()
    estimate = (old_V.exp() * estimator("corrected_k3")(now_V, other_V, old_V)).sum()
    torch.testing.assert_close(estimate, divergence, rtol=1e-9, atol=1e-9)
    (expected,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
    (found,) = torch.autograd.grad(estimate, logits_V)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_the_entropy_bonus_by_hand() -> None:
    """Probabilities 3/4 and 1/4; the gradient of the entropy H with respect to a logit is -p (log p + H)."""
    algorithm = Algorithm(name="x", policy_loss="reinforce", entropy_coef=0.1, source="-")
    logits = tensor([math.log(3.0), 0.0]).reshape(1, 2).requires_grad_()
    zero = tensor([0.0])
    loss, sums, _ = policy_objective(algorithm, zero, zero, zero, tensor([0.5]), entropy_E=entropy(logits))
    h = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(loss.detach()) == pytest.approx(-0.1 * 0.5 * h)
    assert sums.means(algorithm)["entropy"] == pytest.approx(h)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = [0.1 * 0.5 * p * (math.log(p) + h) for p in (0.75, 0.25)]
    assert gradient[0].tolist() == pytest.approx(expected)


@given(st.lists(LOGITS, min_size=1, max_size=4), st.floats(-50.0, 50.0))
def test_entropy_equals_a_plain_implementation_and_does_not_see_a_shift(rows: list[list[float]], shift: float) -> None:
    found = entropy(torch.tensor(rows, dtype=torch.float64))
    for row, value in zip(rows, found.tolist(), strict=True):
        total = sum(math.exp(x) for x in row)
        shares = [math.exp(x) / total for x in row]
        assert value == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-9)
        assert -1e-12 <= value <= math.log(len(row)) + 1e-12
    torch.testing.assert_close(entropy(torch.tensor(rows, dtype=torch.float64) + shift), found, rtol=1e-9, atol=1e-9)
