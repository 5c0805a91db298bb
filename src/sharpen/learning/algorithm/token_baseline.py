"""The baseline of each token of `otb`, with which the gradient of a group varies least.

In: the return from each token on, and the distribution that it was sampled from. Out: advantages of single tokens.

The gradient of a token's logprob with respect to the logits is `onehot - p`, whose squared norm is
`w = 1 - 2 p(token) + Σ p²`. The sum W of w from the first token of a rollout to its t-th stands for the squared norm of
the gradient so far. At position t a group is compared with `b_t = Σ G_t W_t / Σ W_t`, over its rollouts that have a
t-th token. Tokens of a rollout are counted over all its calls.

Source: optimal token baseline, arXiv 2602.07078; tokens of several turns are counted as in
`tir_optimal_token_baseline` of verl, but the end of the longest rollout is compared with itself, as the formula says.

Shape suffixes: S loss tokens of a step, rollout after rollout; R distributions, or rollouts; E loss entries; V
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sharpen.learning.algorithm.returns import FloatArray, IndexArray

if TYPE_CHECKING:
    import torch

SMALLEST = 1e-8
"""Added to the sum of weights, as in verl: where every token so far was certain, the baseline is the one of the group
that the returns had before."""


def sum_of_squares(logprobs_RV: torch.Tensor) -> torch.Tensor:
    """Return `Σ p²` of each distribution, shape R."""
    return logprobs_RV.exp().square_().sum(-1)


def energies(logprobs_E: torch.Tensor, squares_E: torch.Tensor) -> torch.Tensor:
    """Return `1 - 2 p + Σ p²` of each sampled token, which rounding must not make negative."""
    return (1.0 - 2.0 * logprobs_E.exp() + squares_E).clamp_(min=0.0)


def less_baseline(
    returns_S: FloatArray, energies_S: FloatArray, rollouts_S: IndexArray, groups_R: IndexArray
) -> FloatArray:
    """Return `G - b` of each token. `rollouts_S` are numbers in order, `groups_R` the group of each."""
    starts = np.flatnonzero(np.append([True], rollouts_S[1:] != rollouts_S[:-1]))
    positions_S = np.arange(len(rollouts_S)) - np.repeat(starts, np.diff([*starts, len(rollouts_S)]))
    weights_S = np.concatenate([np.cumsum(of_rollout) for of_rollout in np.split(energies_S, starts[1:])])
    _, place_S = np.unique(groups_R[rollouts_S] * len(rollouts_S) + positions_S, return_inverse=True)
    totals = np.bincount(place_S, weights_S) + SMALLEST
    baselines = np.bincount(place_S, weights_S * returns_S) / totals
    advantages_S: FloatArray = returns_S - baselines[place_S]
    return advantages_S
