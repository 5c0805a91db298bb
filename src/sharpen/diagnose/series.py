"""The numbers of a run's steps, and the statistics that rules share: edges of a series (its first and last steps),
noise, trends.

In: steps' metrics. Out: means, `Trend`s, slopes.

Shape suffixes: N steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from sharpen.config.run import RunConfig

MIN_TREND_STEPS = 6
"""Below this, the first and the last steps of a run cannot be told from its noise."""
MAX_EDGE = 25
"""Steps at either end that are averaged, at most: more would blur what changes late in a long run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The numbers of one trained step, as in `metrics.jsonl`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What every run has: its settings, and the numbers of its steps."""

    config: RunConfig
    rows: tuple[StepRow, ...]

    def values(self, name: str) -> list[float]:
        """A metric over the steps that have it."""
        return [row.metrics[name] for row in self.rows if name in row.metrics]

    def trend(self, name: str) -> Trend | None:
        """How a metric went, None where too few steps have it."""
        return trend(self.values(name))

    def highest(self, name: str) -> list[StepRow]:
        """The steps that have a metric, the highest first."""
        return sorted((row for row in self.rows if name in row.metrics), key=lambda row: -row.metrics[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A series over the steps: means of its first and last steps, its highest running mean (over fewer steps, since a
    collapse can come early) and where that is (counted from 0), the noise of a single step, and in standard errors the
    change from first to last (`z`) and the fall from the peak to the last (`fall_z`).
    """

    early: float
    late: float
    peak: float
    peak_at: int
    noise: float
    z: float
    fall_z: float


def trend(values: Sequence[float]) -> Trend | None:
    """None where there are fewer than `MIN_TREND_STEPS` values."""
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
    """How many steps at either end are averaged."""
    return max(1, min(MAX_EDGE, num_steps // 4))


def early_mean(values: Sequence[float]) -> float | None:
    """Mean of the first steps; None where there are none."""
    return fmean(values[: edge(len(values))]) if values else None


def late_mean(values: Sequence[float]) -> float | None:
    """Mean of the last steps; None where there are none."""
    return fmean(values[-edge(len(values)) :]) if values else None


def slope_t(values: Sequence[float]) -> float:
    """The slope of a straight line through the values, in standard errors (Student's t); 0 where nothing changes."""
    values_N = np.asarray(values, np.float64)
    steps_N = np.arange(len(values_N)) - (len(values_N) - 1) / 2
    centred_N = values_N - values_N.mean()
    square = float(steps_N @ steps_N)
    slope = float(steps_N @ centred_N) / square
    rest = float(np.sum((centred_N - slope * steps_N) ** 2)) / max(1, len(values_N) - 2)
    scale = max(1e-9 * float(np.abs(values_N).max(initial=0.0)), 1e-12)
    return slope / max(math.sqrt(rest / square), scale / math.sqrt(square))
