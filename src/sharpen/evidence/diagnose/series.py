"""The numbers of a run's steps, and statistics that the rules share: first and last steps, noise, trends.

In: steps' metrics. Out: means, `Trend`s, slopes.

Shape suffix: N steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from sharpen.config.run import RunConfig
from sharpen.evidence.ended import Ended

MIN_TREND_STEPS = 6
"""With fewer steps, the first and the last steps of a run cannot be distinguished from noise."""
MAX_EDGE = 25
"""The most steps averaged at either end: more would blur late changes of a long run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The numbers of one trained step, as in `metrics.jsonl`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The settings of a run, the numbers of its steps, and what ended it early (None: nothing did)."""

    config: RunConfig
    rows: tuple[StepRow, ...]
    ended: Ended | None = None

    def having(self, name: str) -> list[StepRow]:
        """Return the steps that have a metric."""
        return [row for row in self.rows if name in row.metrics]

    def values(self, name: str) -> list[float]:
        """Return the values of a metric in the steps that have it."""
        return [row.metrics[name] for row in self.having(name)]

    def values_around(self, name: str, step: int) -> tuple[list[float], list[float]]:
        """Return the values of a metric up to and including a step, and those after it. Metrics of the trainer are
        missing in steps without a gradient, so that an index into the values of one metric does not fit another's."""
        rows = self.having(name)
        before = [row.metrics[name] for row in rows if row.step <= step]
        return before, [row.metrics[name] for row in rows[len(before) :]]

    def trend(self, name: str) -> Trend | None:
        """Return the trend of a metric, None if too few steps have it."""
        return trend(self.values(name))

    def highest(self, name: str) -> list[StepRow]:
        """Return the steps that have a metric, the highest value first."""
        return sorted(self.having(name), key=lambda row: -row.metrics[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The trend of a series: the means of its first and last steps, its highest running mean (over fewer steps, since a
    collapse can come early) and the index of that peak, the noise of a single step, and, in standard errors, the change
    from first to last (`z`) and the fall from the peak to the last (`fall_z`)."""

    early: float
    late: float
    peak: float
    peak_at: int
    noise: float
    z: float
    fall_z: float


def trend(values: Sequence[float]) -> Trend | None:
    """Return the trend of a series, None if it has fewer than `MIN_TREND_STEPS` values."""
    if len(values) < MIN_TREND_STEPS:
        return None
    width = edge(len(values))
    early, late = fmean(values[:width]), fmean(values[-width:])
    narrow = max(1, width // 3)
    sums_N = np.cumsum([0.0, *values])
    means_N = (sums_N[narrow:] - sums_N[:-narrow]) / narrow
    peak = float(means_N.max())
    # Neighbours differ by noise, not by trend; the median of such differences is 0.954 standard deviations.
    noise = median(abs(b - a) for a, b in pairwise(values)) / 0.954
    least = max(1e-9 * max(abs(early), abs(late)), 1e-12)
    return Trend(
        early=early,
        late=late,
        peak=peak,
        peak_at=int(means_N.argmax()) + narrow // 2,
        noise=noise,
        z=(late - early) / max(noise * math.sqrt(2 / width), least),
        fall_z=(peak - late) / max(noise * math.sqrt(1 / narrow + 1 / width), least),
    )


def edge(num_steps: int) -> int:
    """Return how many steps are averaged at either end."""
    return max(1, min(MAX_EDGE, num_steps // 4))


def early_mean(values: Sequence[float]) -> float | None:
    """Return the mean of the first steps; None if there are none."""
    return fmean(values[: edge(len(values))]) if values else None


def late_mean(values: Sequence[float]) -> float | None:
    """Return the mean of the last steps; None if there are none."""
    return fmean(values[-edge(len(values)) :]) if values else None


def slope_t(values: Sequence[float]) -> float:
    """Return the slope of a line fitted to the values, in standard errors (Student's t); 0 if nothing changes."""
    values_N = np.asarray(values, np.float64)
    steps_N = np.arange(len(values_N)) - (len(values_N) - 1) / 2
    centred_N = values_N - values_N.mean()
    square = float(steps_N @ steps_N)
    slope = float(steps_N @ centred_N) / square
    rest = float(np.sum((centred_N - slope * steps_N) ** 2)) / max(1, len(values_N) - 2)
    scale = max(1e-9 * float(np.abs(values_N).max(initial=0.0)), 1e-12)
    return slope / max(math.sqrt(rest / square), scale / math.sqrt(square))
