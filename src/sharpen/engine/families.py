"""Decides which models the embedded engine serves, and with which forward pass.

In: a loaded Hugging Face causal language model. Out: `ModelShape`, or a `ModelError` that names what is not served.

Served: decoder-only models that call attention through transformers' attention interface and need no more than
`sharpen.models` says that the engine has. Refused: all others, rotary angles that change with the length, quantized
weights on the fast path.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sharpen.errors import ModelError
from sharpen.models.adapters import parts_of
from sharpen.models.configuration import read_config
from sharpen.models.pieces import Piece, text_config
from sharpen.models.table import family_of, needs_of, refuse_unsupported

FAST_FAMILIES = frozenset({"qwen2", "qwen3", "llama"})
"""Model types with our own forward pass (`forward.FastForward`)."""

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The properties of a model that the engine needs. `fast`: it has our own forward pass; only then are the number of
    key-value heads and their size known, the same for all layers (else 0)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    fast: bool


def inspect_model(model: Any, max_model_len: int) -> ModelShape:
    """Check that `model` can be served at `max_model_len`, and return its shape. Raises `ModelError`."""
    name = type(model).__name__
    refuse_unsupported(model.config, name, "engine")
    if getattr(model, "_is_stateful", False) and Piece.RECURRENT not in needs_of(model.config):
        raise ModelError(f"{name} keeps a state that its configuration does not show: not served")
    if not (getattr(model, "_supports_attention_backend", False) or family_of(model.config).listed):
        raise ModelError(f"{name} does not use transformers' attention interface: not served")
    config = text_config(model.config)
    check_length(config, name, max_model_len)
    fast = _is_fast(model)
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads if fast else 0,
        head_dim=_head_dim(config) if fast else 0,
        vocab_size=config.vocab_size,
        fast=fast,
    )


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or int(config.hidden_size) // int(config.num_attention_heads)


def check_length(config: Any, name: str, max_model_len: int) -> None:
    """Raise `ModelError` if the model has fewer than `max_model_len` positions."""
    config = text_config(config)
    ropes = _rope_parameters(config)
    trained = getattr(config, "max_position_embeddings", None)
    for rope in ropes:
        rope_type = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings") or trained
        if rope_type in _LENGTH_DEPENDENT_ROPE and original and max_model_len > original:
            raise ModelError(
                f"{name} has {rope_type!r} rotary embeddings, whose angles change beyond {original} positions, so "
                f"cached keys would be wrong; set max_model_len to at most {original} (it is {max_model_len})"
            )
    if trained and max_model_len > trained:
        raise ModelError(f"max_model_len is {max_model_len}, but {name} has only {trained} positions")


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings. Models with two kinds of layers have one for each kind."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        return [value for value in parameters.values() if isinstance(value, dict)]
    return [parameters]


def _is_fast(model: Any) -> bool:
    """Whether the fast forward pass supports everything in this model's configuration."""
    config = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in FAST_FAMILIES or layer_types != {"full_attention"}:
        return False
    if config.hidden_act != "silu" or getattr(config, "use_sliding_window", False):
        return False
    if any(type(parts_of(module)[0]) is not nn.Linear for module in _projections(model)):
        return False
    probe = torch.zeros(1, 1, config.hidden_size, device=model.device)
    cos, _ = model.model.rotary_emb(probe, torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return int(cos.shape[-1]) == _head_dim(config) and _head_dim(config) % 2 == 0


def _projections(model: Any) -> list[nn.Module]:
    """Return every module whose weight matrix the fast forward pass reads."""
    modules = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        modules += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        modules += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return modules


def end_token_ids(model: Any) -> frozenset[int]:
    """Return the ids that end a generation, from the generation configuration, else from the model's own."""
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config, text_config(model.config)):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else [int(i) for i in ids])
    return frozenset()


def end_ids_of(folder: Path) -> frozenset[int]:
    """Return `end_token_ids` of the model in a folder, without its weights."""
    from transformers import GenerationConfig

    own = folder / "generation_config.json"
    generation = GenerationConfig.from_pretrained(folder) if own.exists() else None
    return end_token_ids(SimpleNamespace(config=read_config(folder), generation_config=generation))
