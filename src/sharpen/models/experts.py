"""The experts of a mixture of experts, whose weights transformers holds as one tensor for each projection of a layer.

In: a loaded Hugging Face model, perhaps with adapters. Out: its modules of experts; the same modules computing with
other weights than they hold: those with their adapters, in the type that their inputs ask for.

Shape suffixes: X experts, O outputs and I inputs of each, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

_EXPERTS = re.compile(r"(Experts|MoE|Moe|SparseMoeBlock)$")


def has_experts(module: nn.Module) -> bool:
    """Whether a model is a mixture of experts."""
    return any(_EXPERTS.search(type(part).__name__) for part in module.modules())


def experts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return by name the parts of a model that hold the weights of all experts of a layer."""
    return {
        name: part
        for name, part in module.named_modules()
        if _EXPERTS.search(type(part).__name__) and expert_weights(part)
    }


def expert_weights(experts: nn.Module) -> list[str]:
    """Return the names of the weights of a part of `experts_of`, each X matrices."""
    return [name for name, weight in experts.named_parameters(recurse=False) if weight.dim() == 3]


def round_experts(module: nn.Module) -> None:
    """Let the experts of a model compute in the type of autocast inside it, as linear layers do, and elsewhere in that
    of their inputs: transformers multiplies the experts of all tokens at once, which autocast does not know."""
    for experts in experts_of(module).values():
        experts.forward = partial(_in_type, experts, experts.forward)


def _in_type(experts: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    inputs: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    device = inputs.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
    weights = dict(experts.named_parameters(recurse=False))
    if all(weight.dtype == dtype for weight in weights.values()):
        return forward(*args, **kwargs)
    rounded = {name: weight.to(dtype) for name, weight in weights.items()}
    return torch.func.functional_call(experts, rounded, args, kwargs)  # comes here again, with nothing left to round


def compute_adapted(layers: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Compute experts with the weights of some adapters added. `layers` are peft's, all of the same experts."""
    experts = layers[0].get_base_layer()
    adapted = {layer.parameter_name: _adapted(layer) for layer in layers if not layer.disable_adapters}
    return torch.func.functional_call(experts, adapted, args, kwargs)


def _adapted(layer: Any) -> torch.Tensor:
    weight: torch.Tensor = layer.get_param()
    (adapter,) = layer.active_adapters
    with torch.autocast(weight.device.type, enabled=False):
        adapted = weight + expert_update(layer, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
        return adapted.to(weight.dtype)


def expert_update(layer: Any, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return what peft's adapter of shapes (X * R, I) and (O, R * X) adds to the weights of experts, in their shape."""
    (adapter,) = layer.active_adapters
    num_experts = layer.num_experts
    down_XRI = down.reshape(num_experts, -1, down.shape[1])
    up_ORX = up.reshape(up.shape[0], -1, num_experts)
    update_XOI: torch.Tensor = layer.scaling[adapter] * torch.einsum("orx,xri->xoi", up_ORX, down_XRI)
    return update_XOI.transpose(1, 2) if getattr(layer.get_base_layer(), "is_transposed", False) else update_XOI
