"""The windows and chunks of a model, made short for the checks at start, whose few tokens would never leave long ones.

In: a loaded model. Out: the model with short windows inside a `with` block, as it was behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

SHORT_WINDOW = 5
_LENGTHS = ("sliding_window", "attention_chunk_size", "floor_scale")


@contextmanager
def short_windows(module: nn.Module) -> Iterator[None]:
    """Make all longer windows and chunks of a model `SHORT_WINDOW` tokens inside this block, and the steps in which
    positions scale queries: those that its layers name, which our attention reads, and those of its configuration, from
    which the model makes its own masks."""
    places: list[Any] = [place for part in module.modules() for place in (part, getattr(part, "config", None))]
    long = [(place, name, length) for place in places for name in _LENGTHS if (length := _length(place, name))]
    try:
        for place, name, _ in long:
            setattr(place, name, SHORT_WINDOW)
        yield
    finally:
        for place, name, length in reversed(long):  # a configuration is the place of many modules
            setattr(place, name, length)


def _length(place: Any, name: str) -> int:
    """Return a length that is to be shortened, or 0."""
    length = getattr(place, name, None)
    return length if isinstance(length, int) and length > SHORT_WINDOW else 0
