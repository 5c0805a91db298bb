"""What a step of a decoder costs at least: operations and bytes, from a model's shape alone.

In: a `Shape`, lengths. Out: numbers that measured times are divided by. Plain arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
}
"""Dense bfloat16 operations per second, from the vendors' data sheets (SXM boards), by a part of the device's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Qwen3 model: `parameters` counts tied embeddings once."""

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def known_peak(device_name: str) -> float | None:
    """The data sheet's bfloat16 peak, None for a device that is not listed."""
    words = device_name.replace("-", " ").split()
    return next((peak for name, peak in PEAKS.items() if name in words), None)


def causal_pairs(lengths: Iterable[int]) -> int:
    """(query, key) pairs that causal attention has over whole sequences of these lengths."""
    return sum(length * (length + 1) // 2 for length in lengths)


def tree_pairs(paths: Iterable[tuple[int, int]]) -> int:
    """The same over a pack's segments, each (tokens before it on its path, its own tokens)."""
    return sum(before * own + own * (own + 1) // 2 for before, own in paths)


def training_flops(shape: Shape, tokens: int, pairs: int) -> float:
    """Operations of forward and backward pass: `6 N tokens + 12 layers heads head_dim pairs`.

    Each parameter is in one multiply-add per token (2 operations), twice that in the backward pass: 6 N. N counts tied
    embeddings once: as output layer they multiply, as input they do not. Attention has two products (scores, values) of
    2 head_dim operations for each pair and head, three times over forward and backward: 12 head_dim. `pairs` are only
    those that a causal mask leaves; with all T² of a sequence, as some report it, the figure would be larger. What is
    computed twice (checkpointing, chunks of logits) counts once.
    """
    return 6.0 * shape.parameters * tokens + 12.0 * shape.layers * shape.heads * shape.head_dim * pairs


def kv_bytes_per_token(shape: Shape, itemsize: int) -> int:
    """Keys and values of one position in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize


def decode_bound(shape: Shape, *, sequences: int, prompt: int, new: int, itemsize: int, bytes_per_s: float) -> float:
    """Tokens per second if decoding did nothing but read, at `bytes_per_s`: in each step every weight once, and the
    keys and values of all positions so far of each sequence. The prompts' own pass is left out, so it is a bound:

    `sequences new / Σ_t (N itemsize + sequences (prompt + t) kv) * bytes_per_s`, t = 0 .. new - 1.
    """
    per_position = kv_bytes_per_token(shape, itemsize)
    weights = shape.parameters * itemsize
    positions = sum(prompt + step for step in range(new))
    return sequences * new * bytes_per_s / (weights * new + sequences * positions * per_position)
