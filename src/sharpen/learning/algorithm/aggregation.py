"""Aggregates per-token losses: computes a weight for each token, normalized over a whole update.

In: the rollout and call of each loss token of the update. Out: weights such that the loss of the update is
`sum(weights * losses)`. The weights are fixed before the update is split into micro-batches, so splitting, order,
padding and merging do not change the gradient.

The units are the token, the call and the rollout. In names, "sequence" means a call, never a merged sequence. Rollouts
and calls without loss tokens do not count.

Shape suffixes: E loss tokens of the update.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sharpen.config.run import Aggregation

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]


def token_weights(
    aggregation: Aggregation, rollouts_E: IndexArray, calls_E: IndexArray, *, length: int | None = None
) -> FloatArray:
    """Return the weights of the loss tokens of one update. `length` is the divisor for `constant-length`.

    `rollouts_E` and `calls_E` are numbers that are unique over the whole update (calls of two rollouts must not share a
    number).
    """
    if len(rollouts_E) != len(calls_E):
        raise ValueError(f"one rollout and one call per token: got {len(rollouts_E)} and {len(calls_E)}")
    ones_E = np.ones(len(calls_E))
    match aggregation:
        case "token-mean":  # every token has the same weight
            return ones_E / max(len(calls_E), 1)
        case "sequence-mean-token-mean":  # every call has the same weight, shared equally by its tokens
            sizes_E, num_calls = _sizes(calls_E)
            return ones_E / (sizes_E * num_calls)
        case "sequence-mean-token-sum":  # sum over a call's tokens, mean over calls
            return ones_E / _sizes(calls_E)[1]
        case "rollout-mean":  # every rollout has the same weight, shared equally by the tokens of all its calls
            sizes_E, num_rollouts = _sizes(rollouts_E)
            return ones_E / (sizes_E * num_rollouts)
        case "constant-length":  # sum over a rollout's tokens, over a constant: Dr. GRPO, arXiv 2503.20783, app. A
            if length is None:
                raise ValueError("constant-length needs the length to divide by")
            return ones_E / (length * _sizes(rollouts_E)[1])


def _sizes(unit_E: IndexArray) -> tuple[FloatArray, int]:
    """Return the size of each token's unit in tokens, and the number of units (at least 1)."""
    _, inverse_E, counts = np.unique(unit_E, return_inverse=True, return_counts=True)
    return counts[inverse_E].astype(np.float64), max(len(counts), 1)
