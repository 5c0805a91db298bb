"""Numbers as pages show them: with their interval, as a series, as JSON.

In: results of `monitor.statistics`, metrics. Out: records in which an unknown number is None, never NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.show.monitor.statistics import Accuracy, Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A value with its 95% interval (None: unknown), over `count` tasks."""

    value: float
    low: float | None = None
    high: float | None = None
    count: int = 0

    @classmethod
    def of(cls, result: Accuracy | Difference) -> Measure | None:
        """The result of an evaluation; None if there is none."""
        value = result.accuracy if isinstance(result, Accuracy) else result.difference
        if not math.isfinite(value):
            return None
        return cls(value=value, low=finite(result.low), high=finite(result.high), count=result.num_tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A curve: for each place its step, its time (seconds since 1970, None if not recorded) and its value; `low` and
    `high` are a band or intervals, or empty."""

    name: str
    steps: tuple[int, ...]
    times: tuple[float | None, ...]
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How many there are of a kind."""

    name: str
    count: int
    share: float


def counts(numbers: Mapping[str, int]) -> tuple[Count, ...]:
    """Return counts with their shares, most first."""
    total = sum(numbers.values()) or 1
    ordered = sorted(numbers.items(), key=lambda pair: -pair[1])
    return tuple(Count(name=name, count=count, share=count / total) for name, count in ordered)


def finite(value: Any) -> float | None:
    """Return a number, None for anything that is not a finite one."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def thinned(values: Sequence[float], most: int) -> tuple[float, ...]:
    """Return at most so many values, evenly spaced, the last among them."""
    if len(values) <= most:
        return tuple(values)
    return tuple(values[round(place * (len(values) - 1) / (most - 1))] for place in range(most))


def to_json(value: Any) -> Any:
    """Return a record as plain JSON; a number that is not finite becomes None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
