"""Rewards and other numbers that user code returns.

In: anything. Out: a float, or what is wrong with it.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

MAX_REWARD = 1e15
"""The largest reward, up or down: the sums of squares of a batch must be numbers of float32."""


def as_number(value: Any) -> float | None:
    """Return a Python or numpy number, a boolean, or a zero-dimensional array or tensor as a float; else None."""
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # an integer
            return math.inf if operator.gt(value, 0) else -math.inf
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return as_number(value.item())
    return None


def problem_of_reward(number: float | None) -> str | None:
    """Say what a reward must be that this number (None: something else) is not; None if it is one."""
    if number is None:
        return "a number"
    if not math.isfinite(number):
        return "a finite number"
    return None if abs(number) <= MAX_REWARD else f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
