"""Towers that are kept as files alone: a stand-in without weights is loaded in their place.

In: the configuration of a checkpoint. Out: one from which transformers builds the checkpoint's own class without these
towers. A text agent never needs them; their tensors go from checkpoint to checkpoint byte for byte, as all that
transformers does not load (`models.checkpoint`). Gemma 3n's towers are kept so: that for images is of the package
timm, which transformers needs to build it.

Gemma 3n's text decoder has no embeddings of the tokens for images and sounds, which a text may have and a model may
sample: the whole model puts them in before the decoder. `embed_all_tokens` does so for a decoder that is given ids.

Shape suffixes: N tokens of a pass, C hidden size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch

_KEPT = "gemma3n"
"""The model type whose towers are kept so."""


def with_stand_ins(config: Any) -> Any:
    """Return the configuration to load a checkpoint with: itself, unless towers of its family are kept as files."""
    if config.model_type != _KEPT:
        return config
    replaced = copy.deepcopy(config)
    for name in ("vision_config", "audio_config"):
        tower = getattr(config, name)
        if stand_in := _stand_ins().get(type(tower)):
            setattr(replaced, name, stand_in(**tower.to_dict()))
    return replaced


@functools.cache
def _stand_ins() -> Mapping[type, Any]:
    """Return, for each class of a tower's configuration, one that transformers builds a model without weights from."""
    from transformers import AutoModel, Gemma3nAudioConfig, Gemma3nVisionConfig, PreTrainedModel

    made: dict[type, Any] = {}
    for tower, place in ((Gemma3nVisionConfig, "vision_tower"), (Gemma3nAudioConfig, "audio_tower")):
        config: Any = type(f"StandIn{tower.__name__}", (tower,), {"model_type": f"{tower.model_type}_stand_in"})
        fields = {"config_class": config, "_keys_to_ignore_on_load_unexpected": [rf"\b{place}\."]}
        AutoModel.register(config, type(f"{config.__name__}Model", (PreTrainedModel,), fields))
        made[tower] = config
    return made


def embed_all_tokens(module: Any, decoder: Any) -> None:
    """Let the text decoder of a model, whenever it is given ids, embed them as the whole model does."""
    if module.config.model_type == _KEPT:
        tables = (module.base_model.embed_vision, module.base_model.embed_audio)
        decoder.register_forward_pre_hook(functools.partial(_embed, tables), with_kwargs=True)


def _embed(
    tables: tuple[Any, ...], decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Put embeddings in place of ids into the decoder's arguments. Each of `tables` has those of some ids."""
    ids_1N = kwargs.pop("input_ids", None)
    if ids_1N is None:
        return None
    embeds_1NC = decoder.get_input_embeddings()(ids_1N)
    for table in tables:
        first, last = table.vocab_offset, table.vocab_offset + table.vocab_size - 1
        is_own_1N = (ids_1N >= first) & (ids_1N <= last)
        own_1NC = table(input_ids=torch.where(is_own_1N, ids_1N, last))
        embeds_1NC = torch.where(is_own_1N[..., None], own_1NC.to(embeds_1NC.dtype), embeds_1NC)
    return args, kwargs | {"inputs_embeds": embeds_1NC, "per_layer_inputs": decoder.get_per_layer_inputs(ids_1N)}
