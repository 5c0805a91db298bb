"""What a model asks of the engine and the trainer beside plain attention, and what each of them has.

In: a Hugging Face configuration. Out: the `Piece`s that it needs. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

Part = Literal["engine", "vllm", "trainer"]
"""Who computes a model: the embedded engine, vLLM behind our engine interface, or the trainer."""


class Piece(StrEnum):
    """Something that a model needs to be computed. Its value is the name in messages and tables."""

    RECURRENT = "layers with a recurrent state"
    CONVOLUTION = "layers with a convolution state"
    EXPERTS = "experts"
    VISION = "a vision tower"
    AUDIO = "an audio tower"
    SOFT_CAPS = "soft-capped attention logits"
    SINKS = "attention sinks"
    CHUNKED = "chunked attention"
    INDEXED = "attention that chooses its keys by an index"
    HEAD_SIZES = "head sizes that differ by layer"
    TWO_SIZES = "keys and values of different sizes"
    SHARED_KEYS = "layers that share keys and values"
    OTHER_LAYERS = "layers of a kind that is not known here"


HAS: Mapping[Part, frozenset[Piece]] = {
    "engine": frozenset(
        {
            Piece.VISION,
            Piece.AUDIO,
            Piece.SOFT_CAPS,
            Piece.SINKS,
            Piece.HEAD_SIZES,
            Piece.CHUNKED,
            Piece.TWO_SIZES,
            Piece.SHARED_KEYS,
            Piece.EXPERTS,
            Piece.RECURRENT,
            Piece.CONVOLUTION,
        }
    ),
    "trainer": frozenset(
        {
            Piece.VISION,
            Piece.AUDIO,
            Piece.SOFT_CAPS,
            Piece.SINKS,
            Piece.HEAD_SIZES,
            Piece.CHUNKED,
            Piece.TWO_SIZES,
            Piece.SHARED_KEYS,
            Piece.EXPERTS,
            Piece.RECURRENT,
            Piece.CONVOLUTION,
        }
    ),
    "vllm": frozenset(Piece),
}
"""The pieces that each part has, for every family that needs them (a family's own limits are in its row)."""

NAMES: Mapping[Part, str] = {"engine": "embedded engine", "trainer": "trainer", "vllm": "vLLM engine"}
"""The names of the parts in messages."""

_LAYERS = {
    "linear_attention": Piece.RECURRENT,
    "mamba": Piece.RECURRENT,
    "hybrid": Piece.RECURRENT,
    "hybrid_sliding": Piece.RECURRENT,
    "conv": Piece.CONVOLUTION,
    "chunked_attention": Piece.CHUNKED,
    "indexed_attention": Piece.INDEXED,
    "compressed_sparse_attention": Piece.INDEXED,
    "heavily_compressed_attention": Piece.INDEXED,
    "minimax_m3_sparse": Piece.INDEXED,
}
"""What each kind of layer needs beside plain attention."""
_WITHOUT_ATTENTION = frozenset({"moe", "mlp"})
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", *_WITHOUT_ATTENTION})
_TOWERS = {
    "vision_config": Piece.VISION,
    "vision_tower": Piece.VISION,
    "mm_vision_tower": Piece.VISION,
    "audio_config": Piece.AUDIO,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def towers_in(checkpoint: Path) -> tuple[Piece, ...]:
    """Return the kinds of towers that a checkpoint has, by its `config.json`; none if it cannot be read."""
    try:
        config = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError):
        return ()
    fields = config if isinstance(config, dict) else {}
    return tuple(sorted({piece for field, piece in _TOWERS.items() if fields.get(field) is not None}))


def auto_class(checkpoint: Path) -> str:
    """Return the name of transformers' class that loads all of a checkpoint; that of text models if its `config.json`
    cannot be read."""
    return "AutoModelForImageTextToText" if towers_in(checkpoint) else "AutoModelForCausalLM"


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the text decoder: itself, where nothing is nested."""
    return config.get_text_config(decoder=True)


def pieces_of(config: Any) -> frozenset[Piece]:
    """Return the pieces that this configuration shows."""
    text = text_config(config)
    towers = {piece for field, piece in _TOWERS.items() if getattr(config, field, None) is not None}
    return frozenset({*towers, *_layer_pieces(text), *_attention_pieces(text)})


def _layer_pieces(text: Any) -> Iterator[Piece]:
    kinds = set(getattr(text, "layer_types", None) or ())
    yield from (_LAYERS.get(kind, Piece.OTHER_LAYERS) for kind in kinds - _PLAIN_LAYERS)
    if not hasattr(text, "num_attention_heads"):  # nothing but a recurrence of its own
        yield Piece.OTHER_LAYERS
    if any((getattr(text, field, None) or 0) > 1 for field in _EXPERTS) and _routes(text, kinds):
        yield Piece.EXPERTS


def _routes(text: Any, kinds: set[str]) -> bool:
    """Whether some layer routes to its experts: some configurations count experts that no layer has."""
    mixed = set(getattr(text, "mlp_layer_types", None) or ())
    if mixed:
        return "sparse" in mixed
    return "moe" in kinds or not kinds & _WITHOUT_ATTENTION


def _attention_pieces(text: Any) -> Iterator[Piece]:
    if getattr(text, "attn_logit_softcapping", None) is not None:
        yield Piece.SOFT_CAPS
    if getattr(text, "num_kv_shared_layers", None):
        yield Piece.SHARED_KEYS
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else ()
    sizes = {(getattr(layer, "head_dim", None), getattr(layer, "num_key_value_heads", None)) for layer in layers}
    if len(sizes) > 1:
        yield Piece.HEAD_SIZES
    value_size, key_size = getattr(text, "v_head_dim", None), getattr(text, "qk_head_dim", None)
    if value_size is not None and key_size is not None and value_size != key_size:
        yield Piece.TWO_SIZES
