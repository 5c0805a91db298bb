"""Per-token policy losses.

In: logprobs of the sampled tokens now and when they were sampled, and advantages. Out: one loss per token, not
aggregated.

Shape suffixes: E tokens that carry loss.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this size, so that a ratio cannot overflow."""


def log_ratio(logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor) -> torch.Tensor:
    """Log of the probability ratio of each token, clamped to `MAX_LOG_RATIO` on both sides."""
    return (logprobs_E - old_logprobs_E).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    logprobs_E: torch.Tensor,
    old_logprobs_E: torch.Tensor,
    advantages_E: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate loss of each token, and whether a clip holds it (then it has no gradient).

    With ratio ρ and advantage A the loss is `-min(ρ A, clamp(ρ, 1 - clip_low, 1 + clip_high) A)`; where A < 0,
    `dual_clip` c > 1 bounds it by `-c A`.

    Sources: PPO, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729.
    """
    ratio_E = log_ratio(logprobs_E, old_logprobs_E).exp()
    plain_E = -advantages_E * ratio_E
    bounded_E = -advantages_E * ratio_E.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_E = torch.maximum(plain_E, bounded_E)
    clipped_E = bounded_E > plain_E
    if dual_clip is not None:
        ceiling_E = -advantages_E * dual_clip
        over_E = (advantages_E < 0) & (loss_E > ceiling_E)
        loss_E = torch.where(over_E, ceiling_E, loss_E)
        clipped_E = clipped_E | over_E
    return loss_E, clipped_E


def entropy(logits_EV: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each row of logits (V: vocabulary), shape E. Divide by the temperature before."""
    logprobs_EV = torch.log_softmax(logits_EV, dim=-1)
    return -(logprobs_EV.exp() * logprobs_EV.clamp(min=torch.finfo(logprobs_EV.dtype).min)).sum(dim=-1)
