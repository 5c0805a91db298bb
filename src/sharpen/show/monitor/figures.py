"""Numbers as people read them: with few decimals, but never zero for what is not.

In: numbers, intervals. Out: text such as `0.418 [0.376, 0.461]`.

Where an interval has no width, because nothing varies between the tasks, `[on every task]` stands in its place.
"""

from __future__ import annotations

import math

from sharpen.show.monitor.statistics import Accuracy, Difference

_MOST_DECIMALS = 9


def number(value: float, *sizes: float, sign: bool = False) -> str:
    """Format a number: `0.523`, `12.3`, `1,234`, as few decimals as the largest of it and `sizes` needs; one that they
    would make zero with its first digit, `0.0004`. `sign`: `+0.523`, and 0 without one."""
    return fixed(value, _decimals(value, *sizes), sign=sign)


def fixed(value: float, decimals: int, *, sign: bool = False) -> str:
    """Format a number with so many decimals; one that they would make zero with its first digit."""
    plus = "+" if sign and value else ""
    text = f"{value:{plus},.{decimals}f}"
    if value and not any(digit in text for digit in "123456789") and math.isfinite(value):
        return f"{value:{plus}.1g}"
    return text if value else text.lstrip("-")


def with_ends(value: float, low: float, high: float, *sizes: float, sign: bool = False, unit: str = "task") -> str:
    """Format a number with its interval (NaN: unknown) over tasks, or what `unit` names: `+0.561 [+0.514, +0.604]`."""
    shown = _decimals(value, *(sizes or (low, high)))
    return f"{fixed(value, shown, sign=sign)} {ends(low, high, decimals=shown, sign=sign, unit=unit)}"


def ends(low: float, high: float, *, decimals: int = 3, sign: bool = False, unit: str = "task") -> str:
    """Format an interval: `[+0.514, +0.604]`, with more decimals if both ends look the same otherwise."""
    if math.isnan(low) or math.isnan(high):
        return "[unknown]"
    for more in range(decimals, _MOST_DECIMALS):
        texts = fixed(low, more, sign=sign), fixed(high, more, sign=sign)
        if texts[0] != texts[1]:
            return f"[{', '.join(texts)}]"
    return f"[on every {unit}]"


def with_interval(result: Accuracy) -> str:
    """Format an accuracy as `0.418 [0.376, 0.461]`, with fewer decimals if the numbers are large."""
    return with_ends(result.accuracy, result.low, result.high)


def signed(result: Difference, *sizes: float, unit: str = "task") -> str:
    """Format a difference as `+0.561 [+0.514, +0.604]`; `sizes` are the numbers beside it."""
    return with_ends(result.difference, result.low, result.high, *sizes, sign=True, unit=unit)


def _decimals(*values: float) -> int:
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 3 if largest < 10 else 1 if largest < 1000 else 0
