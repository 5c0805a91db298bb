"""The curve of a report as geometry: places in percent of its width and height, which a template draws as SVG.

In: the series of the training and of the evaluations. Out: a `Chart`: a path, points, scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sharpen.show.view.data.measures import Series
from sharpen.show.view.drawing import Scale, Tick, line, over_steps, unit_scale

MAX_POINTS = 600
"""Steps drawn at most; of more, evenly spaced ones."""


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
    """A curve. `training` is an SVG path in a box of 100 x 100, empty if nothing was measured."""

    training_name: str
    training: str
    evaluations: tuple[Evaluations, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def chart(training: Series, evaluations: Sequence[Series]) -> Chart | None:
    """Return the chart of a run; None if nothing was measured."""
    drawn = [series for series in (training, *evaluations) if any(value is not None for value in series.values)]
    if not drawn:
        return None
    across = over_steps([step for series in drawn for step in series.steps])
    up = unit_scale(
        *(series.values for series in drawn), *(ends for one in evaluations for ends in (one.low, one.high))
    )
    pairs = _thinned(list(zip(training.steps, training.values, strict=True)))
    return Chart(
        training_name=training.name,
        training=line([step for step, _ in pairs], [value for _, value in pairs], across, up),
        evaluations=tuple(_evaluations(series, across, up) for series in evaluations if series in drawn),
        x_ticks=tuple(across.ticks(8, whole=True)),
        y_ticks=tuple(up.ticks()),
    )


def _thinned(pairs: Sequence[tuple[int, float | None]]) -> Sequence[tuple[int, float | None]]:
    stride = -(-len(pairs) // MAX_POINTS)
    return pairs if stride <= 1 else [*pairs[:-1:stride], pairs[-1]]


def _evaluations(series: Series, across: Scale, up: Scale) -> Evaluations:
    blank = (None,) * len(series.values)
    rows = zip(series.steps, series.values, series.low or blank, series.high or blank, strict=True)
    points = tuple(
        Point(
            x=across.at(step),
            y=_from_top(value, up),
            low=None if low is None else _from_top(low, up),
            high=None if high is None else _from_top(high, up),
            text=f"{series.name}, step {step}: {value:.3f}"
            + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"),
        )
        for step, value, low, high in rows
        if value is not None
    )
    return Evaluations(name=series.name, points=points)


def _from_top(value: float, up: Scale) -> float:
    return round(100.0 - up.at(value), 2)
