"""Per-token estimators of the divergence KL(policy || other) from the logprobs of tokens that the policy sampled.

In: logprobs of the sampled tokens under both, and under the policy that sampled them. Out: an estimate per token.
Source: J. Schulman, "Approximating KL divergence", 2020 (joschu.net/blog/kl-approx.html). With x = policy - other in
log space:

- k1 = x: unbiased as a value, but its gradient has mean 0, so as a loss term it only adds noise;
- k2 = x² / 2: never negative, biased as a value; its gradient is an unbiased estimate of the KL's (on policy);
- k3 = exp(-x) - 1 + x: never negative, unbiased as a value; its gradient is that of KL(other || policy);
- low_var_kl: k3, at most 10;
- abs = |x|;
- corrected_k3: k3 times the ratio of the policy to the one that sampled, which makes value and gradient unbiased off
  policy (DeepSeek-V3.2, arXiv 2512.02556; Trinity-RFT 0.6.0 limits that ratio to 2, which biases both).

`adapt_coefficient` adapts the coefficient of such a term from step to step.

Shape suffixes: E tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharpen.learning.algorithm.losses import log_ratio
from sharpen.learning.algorithm.parts import KLFunction, named

if TYPE_CHECKING:
    import torch

_LOW_VAR_MAX = 10.0


def k1(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """Return the log ratio."""
    return logprobs_E - other_E


def k2(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """Return half the squared log ratio."""
    return 0.5 * (logprobs_E - other_E).square()


def k3(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor | None = None) -> torch.Tensor:
    """Return `exp(-x) - 1 + x` of the log ratio x, which is clamped to avoid overflow."""
    import torch

    x_E = log_ratio(logprobs_E, other_E)
    return torch.expm1(-x_E) + x_E


def low_var_kl(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """Return k3, at most 10."""
    return k3(logprobs_E, other_E).clamp(max=_LOW_VAR_MAX)


def absolute(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """Return the absolute log ratio."""
    return (logprobs_E - other_E).abs()


def corrected_k3(logprobs_E: torch.Tensor, other_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
    """Return k3 times the ratio of the policy to the one that sampled."""
    return log_ratio(logprobs_E, old_E).exp() * k3(logprobs_E, other_E)


@dataclass(frozen=True, slots=True, kw_only=True)
class KL:
    """An estimator. `second` is the formula once more, for the certificate: it shares no code with `function`, and
    takes and returns the same, of the tokens of one call; ours are in `evidence.certificate.plain.losses`."""

    function: KLFunction
    second: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None


ESTIMATORS: dict[str, KL] = {
    "k1": KL(function=k1),
    "k2": KL(function=k2),
    "k3": KL(function=k3),
    "low_var_kl": KL(function=low_var_kl),
    "abs": KL(function=absolute),
    "corrected_k3": KL(function=corrected_k3),
}
"""Estimators by their names in the configuration."""


def kl_named(name: str | KL | KLFunction) -> KL:
    """Return the estimator of a name in the settings, with its second formula. Raises `ConfigError` for one of somebody
    else's that is none."""
    return named("kls", name, ESTIMATORS, KL)


def estimator(name: str | KL | KLFunction) -> KLFunction:
    """Return the function of `kl_named`."""
    return kl_named(name).function


_MAX_ERROR = 0.2


def adapt_coefficient(coefficient: float, measured: float, *, target: float, horizon: int, num_rollouts: int) -> float:
    """Return the coefficient of the next step, `coefficient (1 + e n / horizon)`, where `e = measured / target - 1` is
    limited to ±0.2.

    `measured` and `target` are in nats per token; `horizon` and n, the step's `num_rollouts`, count rollouts. n is
    limited to `horizon`, so the coefficient stays positive.

    Source: D. Ziegler et al., arXiv 1909.08593, section 2.2.
    """
    error = min(max(measured / target - 1.0, -_MAX_ERROR), _MAX_ERROR)
    return coefficient * (1.0 + error * min(num_rollouts / horizon, 1.0))
