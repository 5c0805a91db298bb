"""Puts LoRA adapters into a model, and its adapted layers into 4 bits: the same way in engine and trainer.

In: a loaded Hugging Face model, `trainer.lora`. Out: the model with adapters that have no effect yet (peft's layers; B
is 0, A random); its adapted layers by name; adapters by the names of peft's files.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ConfigError, ModelError
from sharpen.models.experts import compute_adapted, expert_weights, experts_of
from sharpen.models.modules import decoder_of, has_towers
from sharpen.models.nf4 import NF4Linear
from sharpen.models.recurrent import mixers_of
from sharpen.models.routing import is_router
from sharpen.models.table import family_of

ADAPTER = "default"
"""peft's name of the only adapter."""
PREFIX = "base_model.model."
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def add_adapters(module: Any, lora: LoraConfig, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Put adapters into `module`, and return their settings (JSON). With `base: nf4` the adapted layers are quantized,
    but for those that are already (`frozen.load_frozen`).
    `dtype` is the least exact type of the adapters; None: each has that of its layer.

    Raises `ConfigError` for target modules that the model does not have.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it misses a kernel for CPUs
    import peft  # takes seconds

    settings = {"rank": lora.rank, "alpha": lora.alpha, "target_modules": _targets(module, lora)}
    if lora.experts:
        settings["target_parameters"] = _expert_targets(module)
    with _weights_as(module, dtype):
        peft.inject_adapter_in_model(peft_config(module, settings), module, ADAPTER)
    for name, layer in adapted_layers(module).items():
        layer.eval()
        if is_of_experts(layer):
            if not name.endswith(".base_layer"):  # peft puts the adapters of one part into each other
                layer.forward = partial(compute_adapted, [part for part in layer.modules() if is_of_experts(part)])
            continue
        if lora.base == "nf4" and not isinstance(layer.base_layer, NF4Linear):
            layer.base_layer = NF4Linear(layer.base_layer)
        kind: Any = type(layer)
        layer.__class__ = _faster(kind)  # a function of its own would make a circle, which keeps its weights
    return settings


@functools.cache
def _faster(kind: Any) -> Any:
    """Return peft's kind of layer with `_forward`."""
    return type(kind.__name__, (kind,), {"forward": _forward})


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute a linear layer with its adapter as peft does, but with the input rounded once for both, the scale on the
    smaller side, and the frozen product last: where a checkpointed block is computed again, it may end before it."""
    kind = x.device.type
    rounds = torch.is_autocast_enabled(kind)
    if rounds and x.dtype == torch.float32:
        x = x.to(torch.get_autocast_dtype(kind))
    if layer.disable_adapters:
        alone: torch.Tensor = layer.base_layer(x)
        return alone
    down, up, scale = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], layer.scaling[ADAPTER]
    small = down(x if rounds else x.to(down.weight.dtype))
    update = up(small if scale == 1.0 else small * scale)
    base = layer.base_layer(x)
    adapted: torch.Tensor = (base + update).to(base.dtype)
    return adapted


@contextmanager
def _weights_as(module: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Let linear layers have weights of a wider type, without contents, inside this block: peft rounds an adapter, once
    it is drawn, to the type of its layer's. Those in 4 bits have the type that they compute in."""
    layers: list[nn.Linear] = []
    own: dict[int, torch.Tensor] = {}
    for layer in (part for part in module.modules() if isinstance(part, nn.Linear)):
        kinds = [layer.state.dtype if isinstance(layer, NF4Linear) else layer.weight.dtype, *([dtype] if dtype else [])]
        wanted = max(kinds, key=lambda kind: kind.itemsize)
        if wanted != layer.weight.dtype:
            layers.append(layer)
            weight = own.setdefault(id(layer.weight), layer.weight.data)  # tied ones once
            layer.weight.data = torch.empty(1, dtype=wanted, device=weight.device).expand(weight.shape)
    try:
        yield
    finally:
        for layer in layers:
            layer.weight.data = own[id(layer.weight)]


def is_of_experts(layer: Any) -> bool:
    """Whether this is a layer of peft that adapts the weights of experts."""
    import peft

    return isinstance(layer, peft.tuners.lora.layer.ParamWrapper)


def adapted_layers(module: Any) -> dict[str, Any]:
    """Return the layers with an adapter by their names in `module`."""
    import peft

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """An adapter: it adds `scale` x `up` `down` to a weight. Suffixes: A rank, C inputs, O outputs."""

    down_AC: torch.Tensor
    up_OA: torch.Tensor
    scale: float


def parts_of(layer: Any) -> tuple[Any, LowRank | None]:
    """Return a linear layer without what peft put around it, and its adapter if it has one."""
    base = getattr(layer, "base_layer", None)
    if base is None:
        return layer, None
    down, up = (getattr(layer, part)[ADAPTER].weight for part in ("lora_A", "lora_B"))
    return base, LowRank(down_AC=down, up_OA=up, scale=float(layer.scaling[ADAPTER]))


def peft_config(module: Any, settings: Mapping[str, Any], *, inference_mode: bool = False) -> Any:
    """Return peft's configuration of adapters with the settings that `add_adapters` returned."""
    import peft

    return peft.LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        target_modules=_where(module, settings["target_modules"]),
        target_parameters=settings.get("target_parameters"),
        task_type="CAUSAL_LM",
        base_model_name_or_path=module.config._name_or_path or None,
        inference_mode=inference_mode,
    )


def adapter_shapes(module: Any, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapters that `add_adapters` would put into `module`, by the names of peft's files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names_to_adapt(module, lora):
        layer = module.get_submodule(name)
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (lora.rank, layer.in_features)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (layer.out_features, lora.rank)
    return shapes


def names_to_adapt(module: Any, lora: LoraConfig) -> list[str]:
    """Return the names of the linear layers that `add_adapters` would put adapters into. Raises `ConfigError` for
    target modules that the model does not have."""
    targets, own = _targets(module, lora), set(decoder_of(module).modules())
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer in own and name.rpartition(".")[2] in targets
    ]


def check_adapters(shapes: dict[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `ModelError` unless the names and shapes of these adapters are exactly those of a model."""
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in shapes | given if shapes.get(name) != given.get(name)):
        raise ModelError(f"the new adapters do not match this model and trainer.lora: {wrong[0]} is wrong")


def load_adapters(module: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy adapters by the names of peft's files into `module`. Raises `ModelError`, with nothing changed, unless names
    and shapes are exactly those of its adapters."""
    mine = {
        f"{PREFIX}{name}.{part}.weight": getattr(layer, part)[ADAPTER].weight
        for name, layer in adapted_layers(module).items()
        for part in ("lora_A", "lora_B")
    }
    check_adapters({name: tuple(parameter.shape) for name, parameter in mine.items()}, tensors)
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(tensors[name])


def _targets(module: Any, lora: LoraConfig) -> list[str]:
    """Return the last part of the names of the linear layers that get adapters: one that nothing else has."""
    head, names = module.get_output_embeddings(), {True: set[str](), False: set[str]()}
    for name, layer in decoder_of(module).named_modules():
        can_have = isinstance(layer, nn.Linear) and layer is not head and not is_router(layer)
        names[can_have].add(name.rpartition(".")[2])
    linear = sorted(names[True] - names[False] - _without_adapters(module))
    unknown = sorted(set(lora.target_modules or ()) - set(linear))
    if not linear:
        raise ConfigError(
            f"trainer.lora: this model ({module.config.model_type}) has no linear layers in its blocks that could have "
            "adapters; leave trainer.lora out to train all weights"
        )
    if unknown:
        raise ConfigError(
            f"trainer.lora.target_modules names {', '.join(unknown)}, but the linear layers in the blocks of this "
            f"model ({module.config.model_type}) that can have adapters are {', '.join(linear)}"
        )
    return sorted(set(lora.target_modules or linear))


def _expert_targets(module: Any) -> list[str]:
    """Return the names of the weights of experts that get adapters."""
    names = [f"{name}.{weight}" for name, experts in experts_of(module).items() for weight in expert_weights(experts)]
    if not names:
        raise ConfigError(
            f"trainer.lora.experts is true, but this model ({module.config.model_type}) has no experts: leave it out"
        )
    return sorted(names)


def _without_adapters(module: Any) -> set[str]:
    """Return the last part of the names of linear layers whose adapters would have no effect, or that peft refuses."""
    names = {*family_of(module.config).without_adapters}
    if any(hasattr(mixer.module, "dt_proj") for mixer in mixers_of(module)):
        names.add("dt_proj")  # Mamba 1 multiplies by its weight, and does not call the layer
    return names | _taken_for_experts(module)


def _taken_for_experts(module: Any) -> set[str]:
    """Return the names that peft takes for those of single experts, and replaces by the weights of all experts of a
    layer: so it does with those of dense layers and shared experts, too."""
    if importlib.util.find_spec("peft") is None:  # nobody adds adapters then
        return set()
    if importlib.util.find_spec("peft.utils.transformers_weight_conversion") is None:  # older versions replace nothing
        return set()
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = peft.LoraConfig(target_modules=list(_FEED_FORWARD))
    convert_peft_config_for_transformers(converted, model=module, conversions=None)
    return set(_FEED_FORWARD) - set(converted.target_modules)


def _where(module: Any, targets: list[str]) -> list[str] | str:
    """Return the target modules for peft: the last parts of their names; a pattern of whole names if the model has
    towers, whose layers may have the same."""
    if not has_towers(module.config):
        return targets
    decoder = next(name for name, part in module.named_modules() if part is decoder_of(module))
    return rf"{re.escape(decoder)}\.(.*\.)?({'|'.join(targets)})"
