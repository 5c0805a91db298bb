"""How per-token losses become one number: a weight for each token, normalized over a whole update.

In: which rollout and which call each loss token of the update belongs to. Out: weights such that the update's loss is
`sum(weights * losses)`. Since the weights are fixed before the update is split into micro-batches, no split, order,
padding or merge can change the gradient.

The units are the token, the call and the rollout. "Sequence" means a call: never the container that merging calls made.
Rollouts and calls without a loss token do not count.

Shape suffixes: E loss tokens of the update.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]


def token_mean(rollouts_E: IndexArray, calls_E: IndexArray) -> FloatArray:
    """Each token weighs the same."""
    return np.full(len(calls_E), 1.0 / max(len(calls_E), 1))


def sequence_mean_token_mean(rollouts_E: IndexArray, calls_E: IndexArray) -> FloatArray:
    """Each call weighs the same, and so does each token within it: long calls have lighter tokens."""
    sizes_E, num_calls = _sizes(calls_E)
    return 1.0 / (sizes_E * max(num_calls, 1))


def sequence_mean_token_sum(rollouts_E: IndexArray, calls_E: IndexArray) -> FloatArray:
    """Tokens add up within a call, calls are averaged: long calls weigh more."""
    _, num_calls = _sizes(calls_E)
    return np.full(len(calls_E), 1.0 / max(num_calls, 1))


def rollout_mean(rollouts_E: IndexArray, calls_E: IndexArray) -> FloatArray:
    """Each rollout weighs the same, however many calls and tokens it has, and so does each token within it."""
    sizes_E, num_rollouts = _sizes(rollouts_E)
    return 1.0 / (sizes_E * max(num_rollouts, 1))


def constant_length(rollouts_E: IndexArray, calls_E: IndexArray, length: int) -> FloatArray:
    """Tokens add up within a rollout and are divided by a constant instead of its length; rollouts are averaged.

    Source: Dr. GRPO, arXiv 2503.20783, appendix A (`MAX_TOKENS`).
    """
    _, num_rollouts = _sizes(rollouts_E)
    return np.full(len(calls_E), 1.0 / (length * max(num_rollouts, 1)))


AGGREGATIONS: dict[str, Callable[[IndexArray, IndexArray], FloatArray]] = {
    "token-mean": token_mean,
    "sequence-mean-token-mean": sequence_mean_token_mean,
    "sequence-mean-token-sum": sequence_mean_token_sum,
    "rollout-mean": rollout_mean,
}
"""By their names in the configuration (beside `constant-length`)."""


CONSTANT_LENGTH = "constant-length"


def token_weights(
    aggregation: str, rollouts_E: IndexArray, calls_E: IndexArray, *, length: int | None = None
) -> FloatArray:
    """Weights of the loss tokens of one update; `length` is the divisor of `constant-length`, used by no other.

    `rollouts_E` and `calls_E` are integers that tell rollouts and calls apart over the whole update (the calls of two
    rollouts must not share a number).
    """
    if len(rollouts_E) != len(calls_E):
        raise ValueError(f"one rollout and one call per token: got {len(rollouts_E)} and {len(calls_E)}")
    if aggregation == CONSTANT_LENGTH:
        if length is None:
            raise ValueError("constant-length needs the length to divide by")
        return constant_length(rollouts_E, calls_E, length)
    return AGGREGATIONS[aggregation](rollouts_E, calls_E)


def _sizes(unit_E: IndexArray) -> tuple[FloatArray, int]:
    """For each token the number of tokens of its unit, and the number of units."""
    _, inverse_E, counts = np.unique(unit_E, return_inverse=True, return_counts=True)
    return counts[inverse_E].astype(np.float64), len(counts)
