"""Turns numbers into the geometry of small drawings, and into text.

In: values of a run. Out: places in percent of a drawing's width and height (SVG paths in a box of 100 x 100), the
number of a colour, or a number as people read it. No HTML: the macros of the templates place these.
"""

from __future__ import annotations

import math
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

from sharpen.show.monitor.figures import ends, fixed

SHADES = 10
"""The number of steps of the colour scale, 0 to 10."""
DASH = "\u2013"
"""What stands for an unknown number."""

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark at an axis: its place in percent, and what is written there."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps values from `low` to `high` to 0 to 100."""

    low: float
    high: float

    @classmethod
    def over(cls, *values: Iterable[float | None], band: Iterable[float | None] = ()) -> Scale:
        """The scale that shows all of these values, with a little air. A `band` widens it, at each side by half of
        what the values span at most: beyond that it is cut."""
        known = [value for some in values for value in some if value is not None and math.isfinite(value)]
        low, high = min(known, default=0.0), max(known, default=1.0)
        reach, edges = (high - low) / 2, [value for value in band if value is not None and math.isfinite(value)]
        low, high = max(low - reach, min(low, *edges, low)), min(high + reach, max(high, *edges, high))
        if low == high:
            air = abs(low) / 2 or 0.5
            return cls(low=low - air, high=high + air)
        air = 0.06 * (high - low)
        return cls(low=low - air, high=high + air)

    def at(self, value: float) -> float:
        """The place of a value, 0 at `low` to 100 at `high`, cut there."""
        place = 100.0 * (value - self.low) / (self.high - self.low)
        return round(min(100.0, max(0.0, place)), 2)

    def ticks(self, most: int = 5, *, whole: bool = False) -> list[Tick]:
        """Round values along the scale, about so many; only `whole` ones, such as steps."""
        step = _round_step((self.high - self.low) / max(1, most))
        step = float(math.ceil(step)) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        values = [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [Tick(at=self.at(value), text=_tick_text(value, step)) for value in values]


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * nice for nice in (1.0, 2.0, 2.5, 5.0, 10.0) if power * nice >= least * (1 - 1e-9))


def _tick_text(value: float, step: float) -> str:
    if abs(value) >= 10_000 or 0 < step < 1e-4:
        return number(value)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += not math.isclose(step * 10**decimals, round(step * 10**decimals))
    return f"{value + 0.0:.{decimals}f}"


def spark(values: Values) -> str:
    """The path of a small curve over its own range."""
    return line(range(len(values)), values, Scale(low=0, high=max(1, len(values) - 1)), Scale.over(values))


def spark_end(values: Values) -> tuple[float, float] | None:
    """Where the last known value of a small curve lies."""
    scale = Scale.over(values)
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    if not known:
        return None
    place, value = known[-1]
    return Scale(low=0, high=max(1, len(values) - 1)).at(place), round(100 - scale.at(value), 2)


def line(steps: Iterable[float], values: Values, across: Scale, up: Scale) -> str:
    """The path of a curve, broken where a value is unknown. A value between two unknown ones is a short stroke."""
    parts: list[str] = []
    pen_down = False
    for step, value in zip(steps, values, strict=True):
        if value is None:
            pen_down = False
            continue
        parts.append(f"{'L' if pen_down else 'M'}{across.at(step):g} {100 - up.at(value):g}")
        if not pen_down:
            parts.append("h.01")
        pen_down = True
    return "".join(parts)


def band(steps: Sequence[float], low: Values, high: Values, across: Scale, up: Scale) -> str:
    """The path of the area between two curves, where both are known."""
    places = [
        (across.at(step), 100 - up.at(bottom), 100 - up.at(top))
        for step, bottom, top in zip(steps, low, high, strict=True)
        if bottom is not None and top is not None
    ]
    if len(places) < 2:
        return ""
    forth = "L".join(f"{x:g} {top:g}" for x, _, top in places)
    back = "L".join(f"{x:g} {bottom:g}" for x, bottom, _ in reversed(places))
    return f"M{forth}L{back}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A part of a stacked bar in percent: the left edge, the width, and the number of its part."""

    x: float
    y: float
    width: float
    height: float
    part: int


def stacked(parts: Sequence[Values], most: int = 60) -> tuple[list[Bar], Scale]:
    """Bars side by side, one for each place in the series, their parts stacked; of more than `most` places, means."""
    columns = [[value or 0.0 for value in column] for column in zip(*parts, strict=True)]
    size = max(1, math.ceil(len(columns) / most))
    chunks = [columns[start : start + size] for start in range(0, len(columns), size)]
    means = [[sum(column[part] for column in chunk) / len(chunk) for part in range(len(parts))] for chunk in chunks]
    up = Scale(low=0.0, high=1.04 * max((sum(column) for column in means), default=0.0) or 1.0)
    bars = []
    for place, column in enumerate(means):
        bottom = 0.0
        for part, value in enumerate(column):
            height = up.at(value)
            x, width = 100 * (place + 0.1) / len(means), 80 / len(means)
            bars.append(
                Bar(x=round(x, 2), y=round(100 - bottom - height, 2), width=round(width, 2), height=height, part=part)
            )
            bottom += height
    return bars, up


def shade(value: float | None, low: float = 0.0, high: float = 1.0) -> int | None:
    """The number of a value's colour, 0 to `SHADES`; None for an unknown value."""
    if value is None or not math.isfinite(value):
        return None
    return round(SHADES * Scale(low=low, high=high if high > low else low + 1.0).at(value) / 100)


def number(value: float | None) -> str:
    """A number in at most about six letters."""
    if value is None or not math.isfinite(value):
        return DASH
    size = abs(value)
    if value == int(value) and size < 100_000:
        return f"{int(value)}"
    if size >= 1e5 or 0 < size < 1e-3:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return (
        f"{value:.0f}"
        if size >= 1000
        else f"{value:.1f}"
        if size >= 100
        else f"{value:.2f}"
        if size >= 10
        else f"{value:.3f}"
    )


def rate(value: float | None) -> str:
    """A reward or an accuracy with three decimals."""
    return DASH if value is None else fixed(value, 3) if abs(value) < 1000 else number(value)


def signed(value: float | None) -> str:
    """A difference with its sign."""
    if value is None:
        return DASH
    return fixed(value, 3, sign=True).replace("-", "\u2212") if abs(value) < 1000 else number(value)


def between(low: float | None, high: float | None, *, is_signed: bool = False) -> str:
    """An interval in brackets, or that all tasks have the same; empty if an end is unknown."""
    if low is None or high is None:
        return ""
    text = ends(low, high, decimals=3 if max(abs(low), abs(high)) < 1000 else 0, sign=is_signed)
    return text.replace("-", "\u2212") if is_signed else text


def share(value: float | None) -> str:
    """A share in percent."""
    if value is None:
        return DASH
    percent = 100 * value
    return f"{percent:.1f}%" if 0 < percent < 1 or 99 < percent < 100 else f"{percent:.0f}%"


def count(value: float | None) -> str:
    """A large count, e.g. `1.2 M`."""
    if value is None:
        return DASH
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (size > 1e3 and value >= size):
            return f"{value / size:.3g} {letter}"
    return f"{value:,.0f}".replace(",", "\u202f")


def seconds(value: float | None) -> str:
    """A duration in the two units that matter."""
    if value is None:
        return DASH
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def hours(value: float | None) -> str:
    """A duration given in hours."""
    return seconds(None if value is None else 3600 * value)


def moment(value: float | None) -> str:
    """A time since 1970 as day and minute of this machine."""
    return DASH if value is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(value))


def held_out_scale(row: Any) -> Scale:
    """The scale of a run's results: 0 to 1 for rewards within it, so that runs are comparable at a glance."""
    known = [value for some in (row.before, row.after) if some for value in (some.low, some.value, some.high)]
    return Scale.over(known) if "loss" in row.measure else unit_scale(known)


def unit_scale(*values: Iterable[float | None]) -> Scale:
    """The scale from 0 to 1 where all values are within it, else one over the values."""
    known = [value for some in values for value in some if value is not None]
    return Scale(low=0.0, high=1.0) if all(0.0 <= value <= 1.0 for value in known) else Scale.over(known)


def over_steps(steps: Sequence[float]) -> Scale:
    """The scale of the steps, without air at its ends."""
    first, last = min(steps, default=0), max(steps, default=1)
    return Scale(low=first, high=max(last, first + 1))


def scale_to(high: float) -> Scale:
    """The scale from 0 to a value, without air at its ends."""
    return Scale(low=0.0, high=high)


def spoken(name: str) -> str:
    """A metric's or check's name with spaces."""
    return name.replace("_", " ")


def changed(query: Mapping[str, Any], **values: Any) -> str:
    """The query of an address with some values replaced; those that are empty are left out."""
    kept = {name: value for name, value in {**query, **values}.items() if value not in (None, "")}
    return urllib.parse.urlencode(kept)


def register(environment: Environment) -> None:
    """Give the templates these functions: formats as filters, geometry as globals."""
    formats: Mapping[str, Any] = {
        "number": number,
        "rate": rate,
        "signed": signed,
        "as_share": share,
        "as_count": count,
        "seconds": seconds,
        "hours": hours,
        "moment": moment,
        "spoken": spoken,
    }
    environment.filters.update(formats)
    environment.globals.update(
        between=between,
        scale=Scale.over,
        span_steps=over_steps,
        scale_to=scale_to,
        spark_path=spark,
        spark_end=spark_end,
        line_path=line,
        band_path=band,
        stacked=stacked,
        span_of=held_out_scale,
        shade=shade,
        changed=changed,
    )
