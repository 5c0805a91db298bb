"""The curve of a report as geometry: places in a box of fixed size, which a template draws as SVG.

In: the series of the training and of the evaluations. Out: a `Chart`: paths, points, ticks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sharpen.view.data.measures import Series

WIDTH, HEIGHT = 760.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 12.0, 34.0
MAX_POINTS = 600
"""Steps drawn at most; of more, evenly spaced ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark at an axis: its place, and what is written there."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An evaluation: its place, the ends of its interval (None: unknown), what it says in words."""

    x: float
    y: float
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluations: points alone, since nothing was measured between them."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A curve. `training` is an SVG path, empty if nothing was measured."""

    training_name: str
    training: str
    evaluations: tuple[Evaluations, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


def chart(training: Series, evaluations: Sequence[Series]) -> Chart | None:
    """Return the chart of a run; None if nothing was measured."""
    drawn = [series for series in (training, *evaluations) if any(value is not None for value in series.values)]
    if not drawn:
        return None
    steps = [step for series in drawn for step in series.steps]
    low, high = _bounds([value for series in drawn for value in series.values if value is not None])
    across = _Axis(min(steps), max(max(steps), min(steps) + 1), LEFT, WIDTH - RIGHT)
    up = _Axis(low, high, HEIGHT - BOTTOM, TOP)
    return Chart(
        training_name=training.name,
        training=_path(_places(training, training.values, across, up)),
        evaluations=tuple(_evaluations(series, across, up) for series in evaluations if series in drawn),
        x_ticks=tuple(Tick(at=across.at(value), text=f"{value:g}") for value in across.round_values(8, whole=True)),
        y_ticks=tuple(Tick(at=up.at(value), text=f"{value:g}") for value in up.round_values(5)),
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps `low` to `high` onto places from `begin` to `end`; what is beyond is drawn at the edge."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return round(self.begin + share * (self.end - self.begin), 1)

    def round_values(self, most: int, *, whole: bool = False) -> list[float]:
        """Return round numbers along the axis, at most so many."""
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / most))
        distance = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)
        distance = max(distance, 1.0) if whole else distance
        first = math.ceil(self.low / distance - 1e-9)
        count = math.floor(self.high / distance + 1e-9) - first
        return [round((first + place) * distance, 10) for place in range(count + 1)]


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the axis: 0 to 1 if all values are within, else the least and the greatest with some air."""
    if all(0.0 <= value <= 1.0 for value in values):
        return 0.0, 1.0
    low, high = min(values), max(values)
    air = 0.05 * (high - low) or 0.5
    return low - air, high + air


def _places(
    series: Series, values: Sequence[float | None], across: _Axis, up: _Axis
) -> list[list[tuple[float, float]]]:
    """Return the places of values, in parts without gaps."""
    parts: list[list[tuple[float, float]]] = [[]]
    for step, value in _thinned(list(zip(series.steps, values, strict=True))):
        if value is None:
            parts.append([])
        else:
            parts[-1].append((across.at(step), up.at(value)))
    return [part for part in parts if part]


def _thinned(pairs: Sequence[tuple[int, float | None]]) -> Iterable[tuple[int, float | None]]:
    stride = -(-len(pairs) // MAX_POINTS)
    return pairs if stride <= 1 else [*pairs[:-1:stride], pairs[-1]]


def _path(parts: Iterable[Sequence[tuple[float, float]]]) -> str:
    return " ".join("M" + " L".join(f"{x:g},{y:g}" for x, y in part) for part in parts)


def _evaluations(series: Series, across: _Axis, up: _Axis) -> Evaluations:
    blank = (None,) * len(series.values)
    rows = zip(series.steps, series.values, series.low or blank, series.high or blank, strict=True)
    points = tuple(
        Point(
            x=across.at(step),
            y=up.at(value),
            low=None if low is None else up.at(low),
            high=None if high is None else up.at(high),
            text=f"{series.name}, step {step}: {value:.3f}"
            + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"),
        )
        for step, value, low, high in rows
        if value is not None
    )
    return Evaluations(name=series.name, points=points)
