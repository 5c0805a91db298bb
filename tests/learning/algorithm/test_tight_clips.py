"""A clip is about how far a step moved the policy, never about rounding between the engine's logprobs and the
trainer's."""

import pytest
import torch

from sharpen.config.run import LossConfig
from sharpen.learning.algorithm.losses import POLICY_LOSSES
from sharpen.learning.algorithm.objective import policy_objective
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.algorithm.resolve import resolve

ROUNDING = 0.02
"""Nats, as bfloat16 leaves them between two ways of computing the same model."""


def gradient_and_clipped(algorithm, old_E, now_E):
    """The gradient of a step's first update by the logprobs, and how many tokens a clip holds."""
    torch.manual_seed(0)
    num = len(now_E)
    advantages_E = torch.randn(num)
    weights_E = torch.full((num,), 1 / num)
    calls_E = torch.arange(num) // 8
    logprobs_E = now_E.clone().requires_grad_()
    loss, sums, _ = policy_objective(algorithm, logprobs_E, old_E, advantages_E, weights_E, now_E, None, calls_E)
    loss.backward()
    return logprobs_E.grad, int(sums.clipped)


def with_ratio():
    return [name for name, preset in PRESETS.items() if POLICY_LOSSES[preset.policy_loss].needs_ratio]


@pytest.mark.parametrize("name", with_ratio())
def test_trap_35_rounding_is_not_clipped_at_identical_weights(name):
    """Nothing is held, and the gradient is that without rounding. Break: return `algorithm.behaviour` at once in
    `default_behaviour`."""
    algorithm = resolve(name, LossConfig(kl="none"), 8, max_tokens=64)
    generator = torch.Generator().manual_seed(1)
    now_E = -torch.rand(512, generator=generator) * 3
    old_E = now_E + ROUNDING * torch.randn(512, generator=generator)
    exact, none = gradient_and_clipped(algorithm, now_E, now_E)
    rounded, held = gradient_and_clipped(algorithm, old_E, now_E)
    assert (none, held) == (0, 0)
    assert float((rounded - exact).norm() / exact.norm()) < 2 * ROUNDING


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gspo", {}),
        ("grpo", {"clip_low": 0.001}),
        ("grpo", {"policy_loss": "gspo"}),
        ("rec", {"clip_high": 0.01}),
        ("sppo", {"policy_loss_args": {"epsilon": 0.02}}),
        ("dapo", {"clip_low": 0.0}),
        ("dppo", {"policy_loss_args": {"high": 0.02}}),
        ("grpo", {"policy_loss": "vespo"}),
    ],
)
def test_a_tight_clip_is_against_the_trainers_own_logprobs(name, settings):
    algorithm = resolve(name, LossConfig(**settings), 8, max_tokens=64)
    assert (algorithm.behaviour, algorithm.behaviour_high) == ("truncated", 2.0)
    plain = resolve(name, LossConfig(**settings, behaviour="none"), 8, max_tokens=64)
    assert plain.behaviour == "none"  # who asks for the record gets it


@pytest.mark.parametrize(
    ("name", "settings"), [("grpo", {}), ("gspo", {"policy_loss": "reinforce"}), ("cispo", {}), ("dppo", {})]
)
def test_a_wide_clip_or_none_stays_against_the_record(name, settings):
    assert resolve(name, LossConfig(**settings), 8, max_tokens=64).behaviour == "none"
