"""The mean over a few runs, with its interval.

In: one number of each run. Out: a `Spread`. Runs are few, so the interval is
Student's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from sharpen.show.monitor.intervals import student


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
    low, high = student(values)
    return Spread(mean=mean, low=low, high=high, deviation=stdev(values), count=count)
