"""Copies new weights into the model that the engine owns, all or nothing.

In: tensors under Hugging Face parameter names. Out: the model's parameters changed in place. Fused projections need
no second copy, since the parameters are views of them (`forward`); tied parameters are one tensor. Tensors that are
the model's own memory (a trainer may keep its weights there) are not copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sharpen.errors import ModelError
from sharpen.models.modules import text_parameters


def copy_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> int:
    """Copy `tensors` into `model`, converting dtype and device.

    Returns how many were copied; tensors that are the model's own memory are not. Raises `ModelError`, with nothing
    changed, for tensors that `match_weights` refuses.
    """
    matched = match_weights(model, tensors)
    copied = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in matched and not _same_memory(parameter, matched[name]):
                parameter.copy_(matched[name])
                copied += 1
    return copied


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.dtype, one.stride()) == (other.data_ptr(), other.dtype, other.stride())


def match_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensor for each parameter of `model`'s text by name, tied ones once, and for those of a trained
    tower, which come too.

    Raises `ModelError` if a parameter is missing, a name is unknown, a shape differs, or two names of a tied parameter
    have different values.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    unknown = sorted(set(tensors) - set(by_name))
    if unknown:
        raise ModelError(f"unknown parameter names in the new weights: {_join_names(unknown)}")
    chosen: dict[int, tuple[torch.Tensor, str]] = {}
    for name, tensor in tensors.items():
        parameter = by_name[name]
        if tensor.shape != parameter.shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, the model needs {tuple(parameter.shape)}")
        if (other := chosen.get(id(parameter))) is not None:
            if not torch.equal(other[0], tensor):
                raise ModelError(f"{name} and {other[1]} are one tied parameter but have different values")
            continue
        chosen[id(parameter)] = (tensor, name)
    missing = sorted(name for name, parameter in text_parameters(model) if id(parameter) not in chosen)
    if missing:
        raise ModelError(f"parameters missing in the new weights: {_join_names(missing)}")
    named = model.named_parameters()
    return {name: chosen[id(parameter)][0] for name, parameter in named if id(parameter) in chosen}


def _join_names(names: list[str]) -> str:
    first = ", ".join(names[:5])
    return first if len(names) <= 5 else f"{first} and {len(names) - 5} more"
