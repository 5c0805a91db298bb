"""Weights for what another policy sampled: by hand, against a plain implementation, and inside the objective."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import LossConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.behaviour import CORRECTIONS, behaviour_weights
from sharpen.learning.algorithm.losses import POLICY_LOSSES
from sharpen.learning.algorithm.objective import policy_objective
from sharpen.learning.algorithm.presets import PRESETS, Algorithm
from sharpen.learning.algorithm.resolve import resolve

GRPO = replace(PRESETS["grpo"], kl="none", kl_coef=0.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*values: float) -> torch.Tensor:
    return tensor(*(math.log(value) for value in values))


def test_weights_by_hand() -> None:
    # proximal 0.8, 0.3, 0.06 over behaviour 0.2, 0.3, 0.6: ratios 4, 1, 0.1
    proximal, behaviour = logs(0.8, 0.3, 0.06), logs(0.2, 0.3, 0.6)
    weights, bounded = behaviour_weights("plain", proximal, behaviour, None, None)
    assert weights.tolist() == pytest.approx([4.0, 1.0, 0.1])
    assert not bounded.any()
    weights, bounded = behaviour_weights("unweighted", proximal, behaviour, None, None)
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert not bounded.any()
    weights, bounded = behaviour_weights("truncated", proximal, behaviour, None, 2.0)
    assert weights.tolist() == pytest.approx([2.0, 1.0, 0.1])
    assert bounded.tolist() == [True, False, False]
    weights, bounded = behaviour_weights("masked", proximal, behaviour, 0.5, 3.0)
    assert weights.tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert bounded.tolist() == [True, False, True]


def test_an_unweighted_loss_by_hand() -> None:
    """As in `test_decoupled_loss_by_hand`: ratio 1.2 to the weights before the step, and nothing corrected."""
    algorithm = replace(GRPO, behaviour="unweighted")
    loss, *_ = policy_objective(algorithm, logs(0.6), logs(0.25), tensor(1.0), tensor(1.0), proximal_E=logs(0.5))
    assert float(loss) == pytest.approx(-1.2)


def test_decoupled_loss_by_hand() -> None:
    """Now 0.6, before the step 0.5, sampled at 0.25: weight 2, ratio 1.2 to the proximal policy, which no clip holds;
    against the record it would be 2.4, clipped."""
    algorithm = replace(GRPO, behaviour="plain")
    now = logs(0.6).requires_grad_()
    loss, sums, tokens = policy_objective(algorithm, now, logs(0.25), tensor(1.0), tensor(1.0), proximal_E=logs(0.5))
    assert float(loss.detach()) == pytest.approx(-2.0 * 1.2)
    assert tokens.log_ratios_E.exp().tolist() == pytest.approx([1.2])  # what the clip is about
    loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-2.4])  # the weight has no gradient of its own
    metrics = sums.means(algorithm)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["behaviour_weight_mean"] == pytest.approx(2.0)
    assert metrics["ratio_mean"] == pytest.approx(2.4)  # to the record, as without a weight
    _, sums, tokens = policy_objective(GRPO, now, logs(0.25), tensor(1.0), tensor(1.0))
    plain = sums.means(GRPO)
    assert plain["clip_fraction"] == 1.0
    assert (tokens.log_ratios_E.exp().tolist(), tokens.clipped_E.tolist()) == (pytest.approx([2.4]), [True])
    assert "behaviour_weight_mean" not in plain


def test_at_the_first_update_the_proximal_policy_is_the_present_one() -> None:
    algorithm = replace(GRPO, behaviour="truncated", behaviour_high=2.0)
    now = logs(0.75, 0.3).requires_grad_()
    loss, sums, _ = policy_objective(algorithm, now, logs(0.25, 0.3), tensor(1.0, -1.0), tensor(0.5, 0.5))
    assert float(loss.detach()) == pytest.approx(0.5 * -2.0 + 0.5 * 1.0)  # ratio 1, weights min(3, 2) and 1
    loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.0, 0.5])
    assert sums.means(algorithm)["behaviour_bounded_fraction"] == 0.5


def test_a_masked_token_has_no_gradient() -> None:
    algorithm = replace(GRPO, behaviour="masked", behaviour_low=0.5, behaviour_high=5.0)
    now = logs(0.9, 0.3).requires_grad_()
    loss, sums, tokens = policy_objective(algorithm, now, logs(0.1, 0.3), tensor(1.0, 1.0), tensor(0.5, 0.5))
    loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0.0, -0.5])
    assert tokens.clipped_E.tolist() == [True, False]
    assert sums.means(algorithm)["clip_fraction"] == 0.0  # by the ratio to the weights before the step


probability = st.floats(0.01, 0.99)


@given(
    st.lists(st.tuples(probability, probability, probability, st.floats(-2, 2)), min_size=1, max_size=6),
    st.sampled_from(sorted(CORRECTIONS)),
)
def test_the_objective_equals_a_plain_implementation(rows: list[tuple[float, float, float, float]], name: str) -> None:
    """Clipped surrogate against the proximal policy, times the weight; mean over tokens."""
    algorithm = replace(GRPO, behaviour=name, behaviour_low=0.5, behaviour_high=2.0)  # type: ignore[arg-type]
    total = 0.0
    for now, proximal, behaviour, advantage in rows:
        weight = proximal / behaviour
        if name == "unweighted":
            weight = 1.0
        if name == "truncated":
            weight = min(weight, 2.0)
        if name == "masked" and not 0.5 <= weight <= 2.0:
            weight = 0.0
        ratio = now / proximal
        surrogate = min(ratio * advantage, max(0.8, min(1.2, ratio)) * advantage)
        if advantage < 0:
            surrogate = max(surrogate, 3.0 * advantage)
        total -= weight * surrogate / len(rows)
    columns = list(zip(*rows, strict=True))
    loss, *_ = policy_objective(
        algorithm,
        logs(*columns[0]),
        logs(*columns[2]),
        tensor(*columns[3]),
        torch.full((len(rows),), 1.0 / len(rows), dtype=torch.float64),
        proximal_E=logs(*columns[1]),
    )
    assert float(loss) == pytest.approx(total, rel=1e-6, abs=1e-9)


RATIO_LOSSES = [name for name, preset in PRESETS.items() if POLICY_LOSSES[preset.policy_loss].needs_ratio]


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_without_mismatch_no_correction_changes_anything(name: str) -> None:
    """Where record, proximal and present policy are one, all weights are 1, with every ratio loss."""
    preset = replace(PRESETS[name], kl="none", kl_coef=0.0, behaviour="none")
    old = logs(0.2, 0.5, 0.9)
    calls = torch.tensor([0, 0, 1])

    def gradient(algorithm: Algorithm) -> list[float]:
        now = old.clone().requires_grad_()
        loss, *_ = policy_objective(algorithm, now, old, tensor(1.0, -1.0, 0.5), tensor(0.3, 0.3, 0.4), calls_E=calls)
        return torch.autograd.grad(loss, now)[0].tolist()  # type: ignore[no-any-return]

    expected = gradient(preset)
    for correction in CORRECTIONS:
        corrected = replace(preset, behaviour=correction, behaviour_low=0.5, behaviour_high=2.0)  # type: ignore[arg-type]
        assert gradient(corrected) == pytest.approx(expected)


def test_settings_give_the_corrections_their_bounds() -> None:
    tis = resolve("grpo", LossConfig(behaviour="truncated"), 4)
    assert (tis.behaviour, tis.behaviour_low, tis.behaviour_high) == ("truncated", None, 2.0)
    icepop = resolve("icepop", LossConfig(behaviour_high=4.0), 4)
    assert (icepop.behaviour, icepop.behaviour_low, icepop.behaviour_high) == ("masked", 0.5, 4.0)
    assert resolve("icepop", LossConfig(behaviour="plain"), 4).behaviour_high is None
    assert resolve("decoupled_ppo", LossConfig(), 1).behaviour == "plain"


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="no probability ratio"):
        resolve("opmd", LossConfig(behaviour="truncated"), 4)
    with pytest.raises(ConfigError, match=r"loss.behaviour_low has no effect: loss.behaviour is 'truncated'"):
        resolve("grpo", LossConfig(behaviour="truncated", behaviour_low=0.5), 4)
    with pytest.raises(ConfigError, match=r"loss.behaviour_high has no effect: loss.behaviour is 'none'"):
        resolve("grpo", LossConfig(behaviour_high=3.0), 4)
