"""The windows and chunks of a model, made short for the checks at start, whose few tokens would never leave long ones.

In: a loaded model. Out: the model with short windows inside a `with` block, as it was behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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


# What Llama 4's attention does by a token's position: chunks, and queries that are scaled.
#
# In: an attention layer of a loaded model. Out: the length of its chunks; its queries, scaled. In a chunked layer a
# token sees the tokens of its chunk alone: those from the last multiple of the chunk's length on. A layer without
# rotary positions scales its queries, so that attention stays sharp in long texts; the model's own code takes a token's
# index in the pass for its position, which it is not where passes hold parts of several sequences.
#
# Shape suffixes: H heads, N tokens of a pass, D head size.

_MARK = "scales_by_position"


def chunk_of(layer: Any) -> int | None:
    """Return the length of the chunks of an attention layer; None if it has none."""
    config: Any = getattr(layer, "config", None)
    size: int | None = getattr(config, "attention_chunk_size", None)
    return size if size is not None and config.layer_types[layer.layer_idx] == "chunked_attention" else None


def take_over_scales(module: nn.Module) -> None:
    """Leave the scaling of queries to `scaled_queries`, in all layers of a model. From then on its own forward pass is
    right only with it."""
    layer: Any
    for layer in module.modules():
        if getattr(layer, "attn_temperature_tuning", False):
            layer.attn_temperature_tuning = False
            setattr(layer, _MARK, not layer.use_rope)


def scaled_queries(layer: Any, query: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
    """Return queries of shape (1, H, N, D) as the layer scales them at these positions."""
    if not getattr(layer, _MARK, False):
        return query
    steps_N = torch.floor((position_N.float() + 1.0) / layer.floor_scale)
    scale_N1 = (torch.log1p(steps_N) * layer.attn_scale + 1.0)[:, None]
    scaled: torch.Tensor = (query * scale_N1).to(query.dtype)
    return scaled
