"""How per-token losses become one number: a weight for each token, normalized over a whole update.

In: which rollout and which call each loss token of the update belongs to. Out: weights such that the update's loss is
`sum(weights * losses)`. Since the weights are fixed before the update is split into micro-batches, no split, order,
padding or merge can change the gradient.

The units are the token, the call and the rollout. "Sequence" means a call: never the container that merging calls made.
Rollouts and calls without a loss token do not count.

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
    """Weights of the loss tokens of one update; `length` is the divisor of `constant-length`, used by no other.

    `rollouts_E` and `calls_E` are integers that tell rollouts and calls apart over the whole update (the calls of two
    rollouts must not share a number).
    """
    if len(rollouts_E) != len(calls_E):
        raise ValueError(f"one rollout and one call per token: got {len(rollouts_E)} and {len(calls_E)}")
    same_E = np.ones(len(calls_E))
    match aggregation:
        case "token-mean":  # each token weighs the same
            return same_E / max(len(calls_E), 1)
        case "sequence-mean-token-mean":  # each call weighs the same, and each token within it: long calls' are lighter
            sizes_E, num_calls = _sizes(calls_E)
            return same_E / (sizes_E * num_calls)
        case "sequence-mean-token-sum":  # tokens add up within a call, calls are averaged: long calls weigh more
            return same_E / _sizes(calls_E)[1]
        case "rollout-mean":  # each rollout weighs the same, however many calls it has, and each token within it
            sizes_E, num_rollouts = _sizes(rollouts_E)
            return same_E / (sizes_E * num_rollouts)
        case "constant-length":  # tokens add up within a rollout, over a constant: Dr. GRPO, arXiv 2503.20783, app. A
            if length is None:
                raise ValueError("constant-length needs the length to divide by")
            return same_E / (length * _sizes(rollouts_E)[1])


def _sizes(unit_E: IndexArray) -> tuple[FloatArray, int]:
    """For each token the number of tokens of its unit, and the number of units, which is at least 1."""
    _, inverse_E, counts = np.unique(unit_E, return_inverse=True, return_counts=True)
    return counts[inverse_E].astype(np.float64), max(len(counts), 1)
