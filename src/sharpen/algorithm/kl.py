"""Per-token estimators of the divergence KL(policy || other) from the logprobs of tokens that the policy sampled.

In: logprobs of the sampled tokens under both, and under the policy that sampled them. Out: one estimate per token.
Source: J. Schulman, "Approximating KL divergence", 2020 (joschu.net/blog/kl-approx.html). With x = policy - other in
log space:

- k1 = x: unbiased as a value, but its own gradient has zero mean: as a loss term it only adds noise;
- k2 = x² / 2: never negative, biased as a value; its gradient is an unbiased one of the KL (on policy);
- k3 = exp(-x) - 1 + x: never negative and unbiased as a value; its gradient is that of the reverse direction;
- low_var_kl: k3, at most 10;
- abs = |x|;
- corrected_k3: k3 times the ratio of the policy to the one that sampled, which makes both value and gradient unbiased
  off policy (DeepSeek-V3.2, arXiv 2512.02556; Trinity-RFT 0.6.0 bounds that ratio by 2, which biases both).

`adapted` changes the coefficient of such a term from step to step.

Shape suffixes: E tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sharpen.algorithm.losses import log_ratio

_LOW_VAR_MAX = 10.0


def k1(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """Log ratio."""
    return logprobs_E - other_E


def k2(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """Half the squared log ratio."""
    return 0.5 * (logprobs_E - other_E).square()


def k3(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor | None = None) -> torch.Tensor:
    """`exp(-x) - 1 + x` of the log ratio x, which is clamped so that it cannot overflow."""
    x_E = log_ratio(logprobs_E, other_E)
    return torch.expm1(-x_E) + x_E


def low_var_kl(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """k3, bounded by 10."""
    return k3(logprobs_E, other_E).clamp(max=_LOW_VAR_MAX)


def absolute(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """Absolute log ratio."""
    return (logprobs_E - other_E).abs()


def corrected_k3(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """k3 weighted with the ratio of the policy to the one that sampled."""
    return log_ratio(logprobs_E, old_E).exp() * k3(logprobs_E, other_E)


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": absolute,
    "corrected_k3": corrected_k3,
}
"""By their names in the configuration."""


_MAX_ERROR = 0.2


def adapted(coefficient: float, found: float, *, target: float, horizon: int, num_rollouts: int) -> float:
    """The next step's coefficient: `coefficient (1 + e n / horizon)` with `e = found / target - 1`, within 0.2 of 0.

    `found` and `target` are nats per token, `horizon` and the step's n rollouts; a step of more rollouts than the
    horizon counts as one horizon, so that the coefficient stays above 0.

    Source: D. Ziegler and others, arXiv 1909.08593, section 2.2.
    """
    error = min(max(found / target - 1.0, -_MAX_ERROR), _MAX_ERROR)
    return coefficient * (1.0 + error * min(num_rollouts / horizon, 1.0))
