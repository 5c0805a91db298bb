"""The modules of a model: the whole checkpoint as transformers loads it, its text decoder, and what else it holds.

In: a model's folder. Out: a module of the full class, so that engine, trainer and checkpoint use the same names; and
the parts of it. Towers and all else that the text of a chat does not pass through are not trained.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from sharpen.errors import ModelError
from sharpen.models.pieces import Piece, pieces_of
from sharpen.models.recurrent import mixers_of
from sharpen.models.stand_ins import with_stand_ins

logger = logging.getLogger(__name__)


def has_towers(config: Any) -> bool:
    """Whether the checkpoint holds more than a text model."""
    return bool(pieces_of(config) & {Piece.VISION, Piece.AUDIO})


def class_for(config: Any, name: str = "the model") -> Any:
    """Return the class of transformers' that loads all of a checkpoint. Raises `ModelError`, with `name`, if there is
    none."""
    if not has_towers(config):
        return AutoModelForCausalLM
    if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ModelError(
            f"{name} (model type {config.model_type!r}) has towers, and transformers has no class that generates text "
            "from it and images: it is not supported"
        )
    return AutoModelForImageTextToText


def load_module(
    source: str | Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Load the weights of a checkpoint whose configuration was read, in `dtype`, on `device`; or use these `weights`,
    without a copy. Raises `ModelError` if they are missing or cannot be read."""
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_no_fallback)
    try:
        if weights is None:
            module = class_for(config, str(source)).from_pretrained(
                source, config=with_stand_ins(config), dtype=dtype, trust_remote_code=False, use_safetensors=True
            )
        else:
            kind: Any = type(skeleton(config))
            module = kind.from_pretrained(None, config=with_stand_ins(config), state_dict=dict(weights), dtype=dtype)
            module.name_or_path = module.config._name_or_path = str(source)
        module = module.to(device)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"the weights of {source} cannot be loaded: {reason}") from error
    if line := slower_way(module, torch.device(device).type):
        _say_once(line)
    return module


def slower_way(module: nn.Module, device_type: str) -> str:
    """Return the line that says which kernels a model's recurrent and convolution layers would have and are not
    installed, or "". There are none for a CPU."""
    kernels = {name for mixer in mixers_of(module) for name in mixer.kernels}
    missing = sorted(name for name in kernels if find_spec(name) is None)
    if device_type != "cuda" or not missing:
        return ""
    packages = " ".join(_PACKAGES[name] for name in missing)
    return (
        f"{type(module).__name__}: its recurrent and convolution layers are computed by transformers' plain "
        f"PyTorch code, right but slower: {', '.join(missing)} not installed (pip install {packages})"
    )


_PACKAGES = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}


@functools.cache
def _say_once(line: str) -> None:
    """Warn, once in a process; engine and trainer load the same model."""
    logger.warning(line)


def _is_no_fallback(record: logging.LogRecord) -> bool:
    """Leave out transformers' line for each function of such a layer, which it writes on a CPU too."""
    return "falling back to its reference" not in record.getMessage()


def skeleton(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model without contents, on the meta device. Its configuration is a copy, which says in which type the
    files are: transformers would write `dtype` there."""
    own = with_stand_ins(copy.deepcopy(config))
    with torch.device("meta"):
        module = class_for(own).from_config(own, dtype=dtype, trust_remote_code=False)
    module.config.dtype = config.dtype
    return module


def decoder_of(module: Any) -> Any:
    """Return the text decoder: from token ids to the hidden states that the output layer reads."""
    decoder = module.get_decoder()
    return decoder.model if hasattr(decoder, "lm_head") else decoder  # Llama 4 says that it is the whole text model


def text_prefixes(module: Any) -> tuple[str, ...]:
    """Return with what the names of the text decoder's and the output layer's tensors begin: all names, if the module
    has no towers."""
    if not has_towers(module.config):
        return ("",)
    parts = (decoder_of(module), module.get_output_embeddings())
    return tuple(f"{name}." for name, part in module.named_modules() if any(part is own for own in parts))


def text_parameters(module: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the text decoder and the output layer by their names in the whole module, tied ones
    once."""
    prefixes = text_prefixes(module)
    return ((name, parameter) for name, parameter in module.named_parameters() if name.startswith(prefixes))


def trained_parameters(module: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what a trainer changes: the text's parameters, frozen under adapters or not, and those of a trained
    tower."""
    prefixes = text_prefixes(module)
    named = module.named_parameters()
    return ((name, one) for name, one in named if name.startswith(prefixes) or one.requires_grad)


def tower_modules(module: Any) -> tuple[nn.Module, ...]:
    """Return the modules whose own parameters are trained only with `trainer.train_towers`: those of the vision tower,
    and what puts its output among the text's embeddings. A sharded model changes its parameters, not its modules."""
    prefixes = text_prefixes(module)
    return tuple(
        part
        for name, part in module.named_modules()
        if not f"{name}.".startswith(prefixes) and not _AUDIO & set(name.split("."))
    )


def own_parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters that these modules have themselves."""
    return (parameter for module in modules for parameter in module.parameters(recurse=False))


_AUDIO = {"audio_tower", "embed_audio"}


def freeze_towers(module: Any, *, but_vision: bool = False) -> None:
    """Stop training all but the text decoder and the output layer; with `but_vision` the vision tower goes on."""
    prefixes = text_prefixes(module)
    going_on = {id(parameter) for parameter in own_parameters(tower_modules(module))} if but_vision else set()
    for name, parameter in module.named_parameters():
        if not name.startswith(prefixes) and id(parameter) not in going_on:
            parameter.requires_grad_(False)
