"""Advantages of the rollouts of one group.

In: one reward per rollout. Out: one advantage per rollout, which every trained call of that rollout receives.
The unit of the statistics is the rollout, however many calls it made.

Shape suffixes: G rollouts of one group.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
CountArray = npt.NDArray[np.int64]

EPSILON = 1e-6
"""Added to the standard deviation before dividing, as in the spec's engine."""


class AdvantageFunction(Protocol):
    """What a preset's `advantage` looks like."""

    def __call__(
        self,
        rewards_G: FloatArray,
        num_calls_G: CountArray,
        *,
        std_normalize: bool,
        step_norm: bool,
        std_threshold: float | None,
    ) -> FloatArray | None:
        """Advantages of one group, or None if the group is to be dropped."""


def grpo(rewards_G: FloatArray, *, std_normalize: bool = True) -> FloatArray:
    """Group-relative advantages: `(r - mean) / (std + 1e-6)` with the unbiased standard deviation.

    `std_normalize=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). A group whose rewards are all the
    same has advantages of exactly 0. Raises `ValueError` for fewer than two rewards or one that is not finite.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
    """
    centred_G = _centred(rewards_G)
    if not std_normalize:
        return centred_G
    return centred_G / (_unbiased_std(centred_G) + EPSILON)


def step_wise_grpo(
    rewards_G: FloatArray,
    num_calls_G: CountArray,
    *,
    step_norm: bool = False,
    std_normalize: bool = True,
    std_threshold: float | None = None,
) -> FloatArray | None:
    """`grpo` on the rollouts' rewards; each rollout's score goes unchanged to every call of it.

    `step_norm` divides a rollout's score by its number of trained calls (`num_calls_G`). A group whose rewards have an
    unbiased standard deviation of at most `std_threshold` is dropped: the result is None.

    Source: `step_wise_grpo` of Trinity-RFT 0.6.0. There a lone run is scored by its raw reward (mean 0, std 1);
    here a group of one is an error, since nothing is relative in it.
    """
    if std_threshold is not None and reward_std(rewards_G) <= std_threshold:
        return None
    scores_G = grpo(rewards_G, std_normalize=std_normalize)
    if not step_norm:
        return scores_G
    return scores_G / np.maximum(num_calls_G, 1)


def reward_std(rewards_G: FloatArray) -> float:
    """Unbiased standard deviation of a group's rewards; exactly 0.0 if and only if all are the same."""
    return _unbiased_std(_centred(rewards_G))


def _centred(rewards_G: FloatArray) -> FloatArray:
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise ValueError(
            f"a group-relative advantage needs the rewards of two rollouts or more; got shape {rewards_G.shape}"
        )
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite; got {rewards_G.tolist()}")
    # Subtracting one member first makes equal rewards exactly zero, where subtracting a rounded mean would not.
    shifted_G = rewards_G - rewards_G[0]
    centred_G: FloatArray = shifted_G - shifted_G.mean()
    return centred_G


def _unbiased_std(centred_G: FloatArray) -> float:
    return float(np.sqrt(np.square(centred_G).sum() / (len(centred_G) - 1)))
