"""Adapters as peft writes them, to be served beside a model's own weights.

In: a folder with `adapter_config.json` and `adapter_model.safetensors`; the model, also without contents. Out:
`NamedAdapter`s that fit the model, or a `ModelError` that says what does not.

Shape suffixes: A rank, C inputs, O outputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.models.adapters import PREFIX, LowRank, names_to_adapt

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out"), (False, None)),
}
"""What may stand in an adapter's configuration: all else changes more than linear layers by a product of low rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAdapter:
    """An adapter by the name that clients ask for. `layers` are its parts by the names of the model's linear layers,
    `base` is the model that its files name ("" if none)."""

    name: str
    folder: Path
    base: str
    layers: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max(len(part.down_AC) for part in self.layers.values())


def read_adapter(name: str, folder: Path) -> NamedAdapter:
    """Read an adapter in peft's format. Raises `ModelError` for files that are missing or damaged, and for what is more
    than low rank products of linear layers (DoRA, biases, whole modules)."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"the adapter {name} in {folder} cannot be read: {error}") from error
    where = f"the adapter {name} ({folder / CONFIG})"
    for key, allowed in _PLAIN.items():
        if (value := config.get(key)) not in allowed:
            raise ModelError(f"{where} has {key} {value!r}, which is not served beside others: merge it into its model")
    alpha, rank, rooted = config.get("lora_alpha"), config.get("r"), bool(config.get("use_rslora"))
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1:
        raise ModelError(f"{where} needs a rank r and lora_alpha, got {rank!r} and {alpha!r}")
    layers = _layers(name, folder, tensors, alpha, rooted=rooted)
    return NamedAdapter(name=name, folder=folder, base=str(config.get("base_model_name_or_path") or ""), layers=layers)


def _layers(
    name: str, folder: Path, tensors: Mapping[str, torch.Tensor], alpha: float, *, rooted: bool
) -> dict[str, LowRank]:
    """Return the parts by the names of their layers. The scale is alpha / rank, or alpha / sqrt(rank) (rsLoRA,
    Kalajdzievski 2023), with a layer's own rank."""
    where, layers = f"the adapter {name} ({folder / WEIGHTS})", {}
    halves = {key.rpartition(".lora_")[0] for key in tensors}
    for half in sorted(halves):
        down_AC, up_OA = tensors.get(f"{half}.lora_A.weight"), tensors.get(f"{half}.lora_B.weight")
        if not half.startswith(PREFIX) or down_AC is None or up_OA is None:
            found = min(key for key in tensors if key.rpartition(".lora_")[0] == half)
            raise ModelError(f"{where} has {found}: expected pairs of {PREFIX}LAYER.lora_A.weight and .lora_B.weight")
        if down_AC.ndim != 2 or up_OA.ndim != 2 or up_OA.shape[1] != len(down_AC):
            raise ModelError(f"{where}: {half} has shapes {tuple(down_AC.shape)} and {tuple(up_OA.shape)}: no product")
        if not (down_AC.isfinite().all() and up_OA.isfinite().all()):
            raise ModelError(f"{where}: {half} has weights that are not finite")
        scale = alpha / (math.sqrt(len(down_AC)) if rooted else len(down_AC))
        layers[half.removeprefix(PREFIX)] = LowRank(down_AC=down_AC, up_OA=up_OA, scale=scale)
    if not layers:
        raise ModelError(f"{where} has no weights")
    return layers


def check_fit(adapter: NamedAdapter, module: Any, folder: Path, given: str) -> None:
    """Check that an adapter is one of this model, which was loaded from `folder` (`given` by the user), and may be
    without contents. Raises `ModelError` for one of another model, for layers that the model does not have or whose
    adapters are not served, and for other shapes."""
    where = f"the adapter {adapter.name} ({adapter.folder})"
    if adapter.base and not _is_same(adapter.base, folder, given):
        raise ModelError(
            f"{where} was trained on {adapter.base}, but {given} is served: serve that model, or, if it is the same by "
            f"another name, set base_model_name_or_path in its {CONFIG}"
        )
    known = set(names_to_adapt(module, LoraConfig()))
    if unknown := sorted(set(adapter.layers) - known):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ModelError(
            f"{where} changes {unknown[0]}{more}, but {given} has no such linear layer in its blocks that could have "
            "an adapter"
        )
    for name, part in adapter.layers.items():
        layer = module.get_submodule(name)
        shape, needed = (len(part.up_OA), part.down_AC.shape[1]), (layer.out_features, layer.in_features)
        if shape != needed:
            raise ModelError(
                f"{where} is of another model: {name} has {needed[1]} inputs and {needed[0]} outputs in {given}, the "
                f"adapter's {shape[1]} and {shape[0]}"
            )


def _is_same(base: str, folder: Path, given: str) -> bool:
    """Whether the model that an adapter names is this one: the same folder, or the same name at another place."""
    if base == given or Path(base).expanduser().resolve() == folder.resolve():
        return True
    return _short_name(base) in {_short_name(str(folder)), _short_name(given)}


def _short_name(path: str) -> str:
    """Return a model's name without its owner or place; the hub's cache has it in a folder above the files."""
    parts = Path(path).parts
    cached = next((part.rpartition("--")[2] for part in parts if part.startswith("models--")), "")
    return (cached or (parts[-1] if parts else "")).lower()
