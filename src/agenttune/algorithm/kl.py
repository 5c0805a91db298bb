"""Per-token estimators of the divergence KL(policy || other) from the logprobs of tokens that the policy sampled.

In: logprobs of the sampled tokens under both. Out: one estimate per token. Source: J. Schulman, "Approximating KL
divergence", 2020 (joschu.net/blog/kl-approx.html). With x = policy - other in log space:

- k1 = x: unbiased as a value, but its own gradient has zero mean: as a loss term it only adds noise;
- k2 = x² / 2: never negative, biased as a value; its gradient is an unbiased one of the KL (on policy);
- k3 = exp(-x) - 1 + x: never negative and unbiased as a value; its gradient is that of the reverse direction.

Shape suffixes: E tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from agenttune.algorithm.losses import log_ratio


def k1(logprobs_E: torch.Tensor, other_E: torch.Tensor) -> torch.Tensor:
    """Log ratio."""
    return logprobs_E - other_E


def k2(logprobs_E: torch.Tensor, other_E: torch.Tensor) -> torch.Tensor:
    """Half the squared log ratio."""
    return 0.5 * (logprobs_E - other_E).square()


def k3(logprobs_E: torch.Tensor, other_E: torch.Tensor) -> torch.Tensor:
    """`exp(-x) - 1 + x` of the log ratio x, which is clamped so that it cannot overflow."""
    x_E = log_ratio(logprobs_E, other_E)
    return torch.expm1(-x_E) + x_E


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By their names in the configuration."""
