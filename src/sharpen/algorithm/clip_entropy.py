"""Which tokens keep their advantage, by what training on them does to the entropy of the policy.

In: for each trained token of a step its advantage, its logprob, the entropy of the distribution it was drawn from, and
the mean of the discriminator over that distribution. Out: which tokens keep their advantage; the others get 0.

The discriminator of a token with probability p, drawn from a distribution of entropy H, is `S = p (H + log p)`:
raising the token's logit by a small ε lowers the entropy by ε S (arXiv 2602.03392, theorem 3.2). So it is pushing down
tokens with a very negative S that lowers the entropy most: those are left out. Tokens that are pushed up are all kept.

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
"""A standard deviation below this is rounding: every token is kept."""


def discriminator(logprobs_S: FloatArray, entropy_S: FloatArray) -> FloatArray:
    """`p (H + log p)` of each token."""
    found_S: FloatArray = np.exp(logprobs_S) * (entropy_S + logprobs_S)
    return found_S


def mean_discriminator(logprobs_RV: torch.Tensor) -> torch.Tensor:
    """The mean of the discriminator over each distribution, `Σ p² (H + log p)`, shape R."""
    p_RV = logprobs_RV.exp()
    entropy_R = -(p_RV * logprobs_RV).sum(-1)
    return (p_RV * p_RV * (entropy_R[:, None] + logprobs_RV)).sum(-1)


def clip_by_batch(
    advantages_S: FloatArray, logprobs_S: FloatArray, entropy_S: FloatArray, means_S: FloatArray, *, mu: float = 2.5
) -> BoolArray:
    """Tokens with a negative advantage are left out where S is more than `mu` standard deviations below its mean, both
    over all trained tokens of the step.

    Source: Clip_B, arXiv 2602.03392, one-sided as in `clipb` of Trinity-RFT 0.6.0.
    """
    found_S = discriminator(logprobs_S, entropy_S)
    centred_S = found_S - found_S.mean() if len(found_S) else found_S
    return _kept(advantages_S, -centred_S, mu)


def clip_by_vocabulary(
    advantages_S: FloatArray,
    logprobs_S: FloatArray,
    entropy_S: FloatArray,
    means_S: FloatArray,
    *,
    mu: float = 8.5,
    max_frac: float = 1e-4,
) -> BoolArray:
    """As `clip_by_batch`, but S is compared with its mean over the token's own distribution; of the step's tokens at
    most the share `max_frac` (one, if that is less) is left out, those with the lowest S first.

    Source: Clip_V, arXiv 2602.03392, one-sided and bounded as in `clipv` of Trinity-RFT 0.6.0.
    """
    below_S = means_S - discriminator(logprobs_S, entropy_S)
    kept_S = _kept(advantages_S, below_S, mu)
    most = max(int(max_frac * len(kept_S)), 1)
    left_out = np.flatnonzero(~kept_S)
    if len(left_out) > most:
        kept_S[left_out[np.argsort(-below_S[left_out], kind="stable")[most:]]] = True
    return kept_S


def _kept(advantages_S: FloatArray, below_S: FloatArray, mu: float) -> BoolArray:
    """All but the tokens with a negative advantage whose `below_S` is over `mu` standard deviations."""
    std = float(below_S.std()) if len(below_S) else 0.0
    if std < FLAT:
        return np.ones(len(below_S), np.bool_)
    kept_S: BoolArray = ~((advantages_S < 0) & (below_S > mu * std))
    return kept_S
