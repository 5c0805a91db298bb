"""Aggregates per-token losses: computes a weight for each token, normalized over a whole update.

In: the rollout and call of each loss token of the update. Out: weights such that the loss of the update is
`sum(weights * losses)`. The weights are fixed before the update is split into micro-batches, so splitting, order,
padding and merging do not change the gradient.

The units are the token, the call and the rollout. In names, "sequence" means a call, never a merged sequence. Rollouts
and calls without loss tokens do not count.

Shape suffixes: E loss tokens of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sharpen.errors import ConfigError
from sharpen.learning.algorithm.parts import AggregationFunction, named

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]


def token_mean(rollouts_E: IndexArray, calls_E: IndexArray) -> FloatArray:
    """Every token has the same weight."""
    return np.ones(len(calls_E)) / max(len(calls_E), 1)


def sequence_mean_token_mean(rollouts_E: IndexArray, calls_E: IndexArray) -> FloatArray:
    """Every call has the same weight, shared equally by its tokens."""
    sizes_E, num_calls = _sizes(calls_E)
    return 1.0 / (sizes_E * num_calls)


def sequence_mean_token_sum(rollouts_E: IndexArray, calls_E: IndexArray) -> FloatArray:
    """The sum over a call's tokens, and the mean over calls."""
    return np.ones(len(calls_E)) / _sizes(calls_E)[1]


def rollout_mean(rollouts_E: IndexArray, calls_E: IndexArray) -> FloatArray:
    """Every rollout has the same weight, shared equally by the tokens of all its calls."""
    sizes_E, num_rollouts = _sizes(rollouts_E)
    return 1.0 / (sizes_E * num_rollouts)


def constant_length(rollouts_E: IndexArray, calls_E: IndexArray, length: int | None = None) -> FloatArray:
    """The sum over a rollout's tokens, over a constant. Source: Dr. GRPO, arXiv 2503.20783, appendix A."""
    if length is None:
        raise ValueError("constant-length needs the length to divide by")
    return np.ones(len(calls_E)) / (length * _sizes(rollouts_E)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """An aggregation. `second` is the formula once more, for the certificate: it shares no code with `function`, gets
    for each call of an update (the number of its rollout, its number of tokens), and returns the weight of one token
    for each call; ours are in `evidence.certificate.expectation`."""

    function: AggregationFunction
    second: Callable[[Sequence[tuple[int, int]]], Sequence[float]] | None = None


AGGREGATIONS: dict[str, TokenWeights] = {
    "token-mean": TokenWeights(function=token_mean),
    "sequence-mean-token-mean": TokenWeights(function=sequence_mean_token_mean),
    "sequence-mean-token-sum": TokenWeights(function=sequence_mean_token_sum),
    "rollout-mean": TokenWeights(function=rollout_mean),
    "constant-length": TokenWeights(function=constant_length),
}
"""Aggregations by their names in the configuration."""


def aggregation_named(name: str | TokenWeights | AggregationFunction) -> TokenWeights:
    """Return the aggregation of a name in the settings. Raises `ConfigError` for one of somebody else's that is
    none."""
    return named("aggregations", name, AGGREGATIONS, TokenWeights)


def token_weights(
    aggregation: str | TokenWeights | AggregationFunction,
    rollouts_E: IndexArray,
    calls_E: IndexArray,
    *,
    length: int | None = None,
) -> FloatArray:
    """Return the weights of the loss tokens of one update. `length` is the divisor for `constant-length`.

    `rollouts_E` and `calls_E` are numbers that are unique over the whole update (calls of two rollouts must not share a
    number).
    """
    if len(rollouts_E) != len(calls_E):
        raise ValueError(f"one rollout and one call per token: got {len(rollouts_E)} and {len(calls_E)}")
    if aggregation == "constant-length":
        return constant_length(rollouts_E, calls_E, length)
    weights_E = np.asarray(aggregation_named(aggregation).function(rollouts_E, calls_E), np.float64)
    if weights_E.shape != calls_E.shape or not (np.isfinite(weights_E) & (weights_E > 0)).all():
        raise ConfigError(f"loss.aggregation {aggregation} must give each of {len(calls_E)} tokens a positive weight")
    return weights_E


def _sizes(unit_E: IndexArray) -> tuple[FloatArray, int]:
    """Return the size of each token's unit in tokens, and the number of units (at least 1)."""
    _, inverse_E, counts = np.unique(unit_E, return_inverse=True, return_counts=True)
    return counts[inverse_E].astype(np.float64), max(len(counts), 1)
