"""Decides which tokens of an update M2PO trains, by the second moment of their log ratios.

In: for each trained token of an update its advantage and the log of its probability ratio to the policy that sampled
it. Out: which tokens are kept, and the moments before and after.

Only tokens that the loss pushes further from that policy are looked at: those with a positive advantage and a ratio
above 1, or a negative advantage and a ratio below 1. These are the ones that PPO's clip acts on.

Shape suffixes: S trained tokens of the update, R those of them that are pushed further.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Which tokens are kept (shape S), the number of tokens that are pushed further, and the mean of their squared log
    ratios: over all of them, and over those that are kept."""

    kept_S: BoolArray
    num_pushed: int
    before: float
    after: float

    def metrics(self) -> dict[str, float]:
        """Return the metrics of an update; shares are of all its trained tokens."""
        num_tokens = max(len(self.kept_S), 1)
        return {
            "m2_before": self.before,
            "m2_after": self.after,
            "m2_masked_fraction": float((~self.kept_S).sum()) / num_tokens,
            "m2_trust_region_fraction": self.num_pushed / num_tokens,
        }


def within_moment(advantages_S: FloatArray, log_ratios_S: FloatArray, *, threshold: float = 0.04) -> Kept:
    """Keep all tokens if the mean squared log ratio of those that are pushed further is at most `threshold`. Otherwise
    leave out the largest of these, until the mean of the others is. Of equal ones, the last are left out first.

    Source: M2PO, arXiv 2510.01161.
    """
    pushed = np.flatnonzero(advantages_S * log_ratios_S > 0)
    moments_R = np.square(log_ratios_S[pushed])
    order_R = np.argsort(moments_R, kind="stable")
    means_R = np.cumsum(moments_R[order_R]) / np.arange(1, len(pushed) + 1)  # ascending, so they never fall
    num_kept = int(np.searchsorted(means_R, threshold, side="right"))
    kept_S = np.ones(len(advantages_S), np.bool_)
    kept_S[pushed[order_R[num_kept:]]] = False
    return Kept(
        kept_S=kept_S,
        num_pushed=len(pushed),
        before=float(means_R[-1]) if len(pushed) else 0.0,
        after=float(means_R[num_kept - 1]) if num_kept else 0.0,
    )
