"""Decides which tokens keep their advantage, depending on how training on them changes the policy's entropy.

In: for each trained token of a step its advantage, its logprob, the entropy of the distribution it was drawn from, and
the mean of the discriminator over that distribution. Out: which tokens keep their advantage; the others get 0.

The discriminator of a token with probability p, drawn from a distribution with entropy H, is `S = p (H + log p)`:
raising the token's logit by a small ε lowers the entropy by ε S (arXiv 2602.03392, theorem 3.2). The entropy therefore
falls most when tokens with a very negative S are pushed down, so these lose their advantage. Tokens that are pushed up
all keep theirs.

Shape suffixes: S trained tokens of the step, R distributions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

FLAT = 1e-12
"""A standard deviation below this is considered rounding, and every token is kept."""


def discriminator(logprobs_S: FloatArray, entropy_S: FloatArray) -> FloatArray:
    """Return `p (H + log p)` of each token."""
    discriminator_S: FloatArray = np.exp(logprobs_S) * (entropy_S + logprobs_S)
    return discriminator_S


def mean_discriminator(logprobs_RV: torch.Tensor) -> torch.Tensor:
    """Return the mean of the discriminator over each distribution, `Σ p² (H + log p)`, shape R."""
    p_RV = logprobs_RV.exp()
    entropy_R = -(p_RV * logprobs_RV).sum(-1)
    return (p_RV * p_RV * (entropy_R[:, None] + logprobs_RV)).sum(-1)


def clip_by_batch(
    advantages_S: FloatArray, logprobs_S: FloatArray, entropy_S: FloatArray, means_S: FloatArray, *, mu: float = 2.5
) -> BoolArray:
    """Keep all tokens except those with a negative advantage whose S is more than `mu` standard deviations below its
    mean; both statistics are over all trained tokens of the step.

    Source: Clip_B, arXiv 2602.03392, one-sided as in `clipb` of Trinity-RFT 0.6.0.
    """
    discriminator_S = discriminator(logprobs_S, entropy_S)
    centred_S = discriminator_S - discriminator_S.mean() if len(discriminator_S) else discriminator_S
    return _within_limit(advantages_S, -centred_S, mu)


def clip_by_vocabulary(
    advantages_S: FloatArray,
    logprobs_S: FloatArray,
    entropy_S: FloatArray,
    means_S: FloatArray,
    *,
    mu: float = 8.5,
    max_frac: float = 1e-4,
) -> BoolArray:
    """Do the same as `clip_by_batch`, but compare S with its mean over the token's own distribution. At most the share
    `max_frac` of the step's tokens (but at least one) loses its advantage: those furthest below their mean.

    Source: Clip_V, arXiv 2602.03392, one-sided and bounded as in `clipv` of Trinity-RFT 0.6.0.
    """
    below_S = means_S - discriminator(logprobs_S, entropy_S)
    kept_S = _within_limit(advantages_S, below_S, mu)
    max_clipped = max(int(max_frac * len(kept_S)), 1)
    clipped = np.flatnonzero(~kept_S)
    if len(clipped) > max_clipped:
        kept_S[clipped[np.argsort(-below_S[clipped], kind="stable")[max_clipped:]]] = True
    return kept_S


def _within_limit(advantages_S: FloatArray, below_S: FloatArray, mu: float) -> BoolArray:
    """Return False for tokens with a negative advantage whose `below_S` exceeds `mu` standard deviations of it."""
    std = float(below_S.std()) if len(below_S) else 0.0
    if std < FLAT:
        return np.ones(len(below_S), np.bool_)
    kept_S: BoolArray = ~((advantages_S < 0) & (below_S > mu * std))
    return kept_S
