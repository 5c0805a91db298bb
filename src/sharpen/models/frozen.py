"""Loads models whose weights stay as they are: no more of them at once than what will be kept.

In: a model's folder, `trainer.lora`, what an engine in this process has of it. Out: the module, not yet with adapters;
with `base: nf4` its adapted layers in 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.models.adapters import names_to_adapt
from sharpen.models.checkpoint import read_tensor, tensor_files
from sharpen.models.experts import experts_of
from sharpen.models.modules import has_towers, load_module, skeleton
from sharpen.models.nf4 import NF4Linear
from sharpen.models.recurrent import mixers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What an engine in this process holds of a frozen model, by the plain model's names: weights, tied ones once, and
    layers in 4 bits, whose weights are not among them."""

    weights: Mapping[str, torch.Tensor]
    in_4_bits: Mapping[str, NF4Linear] = field(default_factory=dict)


def load_frozen(
    source: str | Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    lora: LoraConfig | None,
    served: Served | None = None,
) -> Any:
    """Load a model in `dtype`, on `device`; with `lora` for `adapters.add_adapters`.

    For `base: nf4` a plain model's adapted layers are read and put into 4 bits one after the other, so that one is
    whole at a time; any other model is loaded whole, and quantized when the adapters are added. What was `served`
    already, all of it in this type and on this device, is used, and no weight is read. Raises `ModelError` if the
    weights are missing or cannot be read.
    """
    if lora is None or (lora.base != "nf4" and served is None):
        return load_module(source, config, dtype, device)
    empty = skeleton(config)
    try:
        files = tensor_files(Path(source))
        names = {name for name, _ in empty.named_parameters()}
        by_layers = lora.base == "nf4" and is_plain(empty) and names <= files.keys()
        layers = sorted(names_to_adapt(empty, lora)) if by_layers else []
        kept = sorted(names - {f"{name}.weight" for name in layers})
        if served is not None and _has_all(served, empty, kept, layers, dtype, torch.device(device)):
            return _put_together(source, config, dtype, device, served)
        if not by_layers:
            return load_module(source, config, dtype, device)
        parts = Served(
            weights={name: read_tensor(files[name], name).to(dtype) for name in kept},
            in_4_bits={
                name: _in_4_bits(read_tensor(files[f"{name}.weight"], f"{name}.weight").to(device, dtype))
                for name in layers
            },
        )
        return _put_together(source, config, dtype, device, parts)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the weights of {source} cannot be loaded: {' '.join(str(error).split())}") from error


def is_plain(module: Any) -> bool:
    """Whether a model is of linear layers, norms and one table of embeddings, and its files hold these as they are."""
    if getattr(module.config, "quantization_config", None) is not None:
        return False
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    plain = tables == [module.get_input_embeddings()] and type(tables[0]) is nn.Embedding
    return plain and not (experts_of(module) or mixers_of(module) or has_towers(module.config))


def _has_all(
    served: Served, module: Any, kept: list[str], layers: list[str], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether an engine has a model's weights, in this type and on this device, and these layers in 4 bits."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters() if name in kept}
    found = {name: tensor.shape for name, tensor in served.weights.items()}
    alike = all(one.dtype == dtype and one.device == device for one in served.weights.values())
    return alike and found == shapes and served.in_4_bits.keys() == set(layers)


def _in_4_bits(weight: torch.Tensor) -> NF4Linear:
    """Quantize the weight of a linear layer without bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return NF4Linear(layer)


def _put_together(
    source: str | Path, config: Any, dtype: torch.dtype, device: torch.device | str, parts: Served
) -> Any:
    """Return a module of these weights and layers, without a copy. Until a layer has its place, one value stands for
    all of its weight."""
    stand_ins = {
        f"{name}.weight": torch.empty(1, dtype=dtype).expand(layer.out_features, layer.in_features)
        for name, layer in parts.in_4_bits.items()
    }
    module = load_module(source, config, dtype, "cpu", weights={**parts.weights, **stand_ins})
    for name, layer in parts.in_4_bits.items():
        layer.bias = module.get_submodule(name).bias
        module.set_submodule(name, layer)
    return module.to(device)
