"""Advantages of single tokens, from rewards and a critic's values.

In: a reward and a value per token, rollout after rollout. Out: an advantage and a return per token.

A rollout is one sequence of states and actions: its trained calls in order. Each sampled token is an action; whatever
comes between two calls (the environment's answer) belongs to the transition. The value after the last token of a call
is therefore that of the first token of the next call, and 0 after the last call. If calls are treated separately (as in
Trinity-RFT's `ppo`), "rollout" below means a call.

Shape suffixes: S sampled tokens of a step, rollout after rollout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sharpen.learning.algorithm.aggregation import FloatArray, IndexArray

_VARIANCE_FLOOR = 1e-8


def gae(
    rewards_S: FloatArray,
    values_S: FloatArray,
    rollouts_S: IndexArray,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
) -> tuple[FloatArray, FloatArray]:
    """Return the generalized advantage estimate of each token, `A_t = δ_t + γ λ A_(t+1)` with
    `δ_t = r_t + γ V_(t+1) - V_t`, and its return `A_t + V_t`.

    The tokens of a rollout are adjacent and in order. `whiten` shifts and scales the advantages (not the returns) to
    mean 0 and variance 1 over all tokens given.

    Sources: GAE, arXiv 1506.02438, equation 16; whitening as in PPO for language models, arXiv 1909.08593, section 2.
    Raises `ValueError` for arrays of different lengths, and for numbers that are not finite.
    """
    if not len(rewards_S) == len(values_S) == len(rollouts_S):
        raise ValueError(
            f"one reward, value and rollout per token: got {len(rewards_S)}, {len(values_S)}, {len(rollouts_S)}"
        )
    if not (np.isfinite(rewards_S).all() and np.isfinite(values_S).all()):
        raise ValueError("rewards and values must be finite numbers")
    continues_S = np.append(rollouts_S[1:] == rollouts_S[:-1], [False])[: len(rollouts_S)]
    next_values_S = np.where(continues_S, np.append(values_S[1:], [0.0])[: len(values_S)], 0.0)
    advantages_S = _discounted_sums(rewards_S + gamma * next_values_S - values_S, continues_S, gamma * lam)
    returns_S = advantages_S + values_S
    return (whitened(advantages_S) if whiten else advantages_S), returns_S


def unbiased_gae(
    rewards_S: FloatArray,
    values_S: FloatArray,
    rollouts_S: IndexArray,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> tuple[FloatArray, FloatArray]:
    """Return the same as `gae`, but whitened with the unbiased variance and with a default λ of 1, as `ppo` of
    Trinity-RFT 0.6.0, whose sequences are calls."""
    advantages_S, returns_S = gae(rewards_S, values_S, rollouts_S, gamma=gamma, lam=lam, whiten=False)
    return (whitened(advantages_S, num_fixed=1) if whiten else advantages_S), returns_S


def sums_to_end(rewards_S: FloatArray, rollouts_S: IndexArray) -> FloatArray:
    """Return for each token the sum of rewards from it to the end of its rollout."""
    continues_S = np.append(rollouts_S[1:] == rollouts_S[:-1], [False])[: len(rollouts_S)]
    return _discounted_sums(rewards_S, continues_S, 1.0)


def whitened(values_S: FloatArray, *, num_fixed: int = 0) -> FloatArray:
    """Shift and scale values to mean 0 and variance 1; equal values all become 0. The variance divides by the number of
    values minus `num_fixed`: 0 for the population variance, 1 for the unbiased one."""
    if len(values_S) <= num_fixed:
        return np.zeros_like(values_S)
    centred_S = values_S - values_S[:1]  # makes equal values exactly zero
    centred_S = centred_S - centred_S.mean()
    variance = np.square(centred_S).sum() / (len(values_S) - num_fixed)
    result_S: FloatArray = centred_S / np.sqrt(variance + _VARIANCE_FLOOR)
    return result_S


def explained_variance(values_S: FloatArray, returns_S: FloatArray) -> float:
    """Return `1 - Var(returns - values) / Var(returns)`: 1 for a perfect critic, 0 for a constant one, NaN if all
    returns are equal."""
    variance = float(np.var(returns_S)) if len(returns_S) else 0.0
    return 1.0 - float(np.var(returns_S - values_S)) / variance if variance > 0.0 else float("nan")


def _discounted_sums(terms_S: FloatArray, continues_S: npt.NDArray[np.bool_], factor: float) -> FloatArray:
    """Return `x_t + factor x_(t+1) + ...` to the end of each token's rollout."""
    terms, continues, sums, total = terms_S.tolist(), continues_S.tolist(), [0.0] * len(terms_S), 0.0
    for place in range(len(terms) - 1, -1, -1):
        total = terms[place] + (factor * total if continues[place] else 0.0)
        sums[place] = total
    return np.array(sums, np.float64)
