"""Importance weights for tokens that were not sampled by the proximal policy (decoupled PPO).

In: logprobs of the sampled tokens under the proximal policy (the trained weights before the step's first update) and
under the behaviour policy (recorded by the engine). Out: one weight per token, without gradient, which multiplies the
policy loss. The loss then clips the ratio of the policy to the proximal one, which measures how far this step has
moved; the weight corrects for sampling with older weights or different arithmetic.

Shape suffixes: E tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharpen.learning.algorithm.losses import log_ratio

if TYPE_CHECKING:
    import torch


def plain(weight_E: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return the ratio unchanged. Source: decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298."""
    return weight_E


def unweighted(weight_E: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return 1, so that the loss clips against the proximal policy and corrects nothing. Source: verl's decoupled mode
    without importance sampling, which recomputes the old logprobs."""
    import torch

    return torch.ones_like(weight_E)


def truncated(weight_E: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return `min(w, high)`. Source: truncated importance sampling, E. Ionides 2008; between engine and trainer: F. Yao
    et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025."""
    return weight_E.clamp(max=high)


def masked(weight_E: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return `w` within `[low, high]`, else 0, so that the token is not trained. Source: IcePop, Ring-1T, arXiv
    2510.18855 (bounds 0.5 and 5 in its training recipe)."""
    import torch

    return torch.where((weight_E >= low) & (weight_E <= high), weight_E, torch.zeros_like(weight_E))


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A weighting function. `low` and `high` are its default bounds, None if it has no such bound."""

    function: Callable[[torch.Tensor, float, float], torch.Tensor]
    formula: str
    low: float | None = None
    high: float | None = None


CORRECTIONS: dict[str, Correction] = {
    "plain": Correction(function=plain, formula="π_prox / π_behaviour"),
    "unweighted": Correction(function=unweighted, formula="1"),
    "truncated": Correction(function=truncated, formula="min(π_prox / π_behaviour, behaviour_high)", high=2.0),
    "masked": Correction(
        function=masked,
        formula="π_prox / π_behaviour within [behaviour_low, behaviour_high], else 0",
        low=0.5,
        high=5.0,
    ),
}
"""Corrections by their names in the configuration (except `none`)."""


def behaviour_weights(
    name: str, proximal_E: torch.Tensor, behaviour_E: torch.Tensor, low: float | None, high: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token (shape E, without gradient), and whether a bound changed it (E, bool)."""
    import torch

    ratio_E = log_ratio(proximal_E.detach(), behaviour_E).exp()
    weight_E = CORRECTIONS[name].function(ratio_E, 0.0 if low is None else low, torch.inf if high is None else high)
    has_bounds = low is not None or high is not None
    return weight_E, weight_E != ratio_E if has_bounds else torch.zeros_like(weight_E, dtype=torch.bool)
