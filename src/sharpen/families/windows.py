"""The sliding windows of a model, made short for the checks at start, whose few tokens would never leave a long one.

In: a loaded model. Out: the model with short windows inside a `with` block, as it was behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

SHORT_WINDOW = 5


@contextmanager
def short_windows(module: nn.Module) -> Iterator[None]:
    """Make all longer windows of a model `SHORT_WINDOW` tokens inside this block: those that its layers name, which
    our attention reads, and those of its configuration, from which the model makes its own masks."""
    places: list[Any] = [place for part in module.modules() for place in (part, getattr(part, "config", None))]
    windows = [(place, window) for place in places if (window := _window(place)) > SHORT_WINDOW]
    try:
        for place, _ in windows:
            place.sliding_window = SHORT_WINDOW
        yield
    finally:
        for place, window in reversed(windows):  # a configuration is the place of many modules
            place.sliding_window = window


def _window(place: Any) -> int:
    window = getattr(place, "sliding_window", None)
    return window if isinstance(window, int) else 0
