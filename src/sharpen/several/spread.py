"""The mean over a few runs, with its interval.

In: one number of each run. Out: a `Spread`. Runs are few, so the interval is Student's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

_T975: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5% quantiles of Student's distribution with 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The mean of `count` runs, its 95% interval (None: a single run), the standard deviation between runs."""

    mean: float
    low: float | None
    high: float | None
    deviation: float | None
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Return the mean with Student's interval; None without values."""
    if not values:
        return None
    mean, count = fmean(values), len(values)
    if count == 1:
        return Spread(mean=mean, low=None, high=None, deviation=None, count=1)
    deviation = stdev(values)
    half = student_quantile(count - 1) * deviation / math.sqrt(count)
    return Spread(mean=mean, low=mean - half, high=mean + half, deviation=deviation, count=count)


def student_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's distribution; above 30 degrees of freedom the normal one's."""
    return _T975[degrees - 1] if degrees <= len(_T975) else NormalDist().inv_cdf(0.975)
