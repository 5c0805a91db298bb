"""A model's weights divided among ranks: PyTorch's FSDP2, layer by layer.

In: a whole model on the CPU and the ranks. Out: the same model, each rank holding a part of every weight on its device;
a layer's weights are gathered when it computes and given back after. Gradients are summed over the ranks, not averaged:
the weights of the loss hold the normalization of the whole update.

With `bfloat16` a layer's weights travel and compute in it, and gradients are summed in fp32; what each rank keeps, and
the optimizer changes, stays fp32. Embeddings, the last norm and the output layer are gathered in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")

_METHOD = "sharpen_compute"


def shard(module: Any, mesh: DeviceMesh, *, dtype: torch.dtype, cpu_offload: bool, keep_head: bool) -> None:
    """Divide a Hugging Face causal model, which computes in `dtype`, over a mesh of one dimension. `keep_head` keeps
    embeddings and output layer gathered between passes, to be used by others.

    From now on it computes only within `one_pass`.
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    policy = MixedPrecisionPolicy()
    if dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True, **settings)
    fully_shard(module, reshard_after_forward=not keep_head, **settings)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    setattr(module, _METHOD, lambda compute: compute())
    register_fsdp_forward_method(module, _METHOD)


def one_pass(module: Any, compute: Callable[[], Result]) -> Result:
    """Run `compute`, which uses the module's parts and gives a tuple of tensors, as one forward pass of the module:
    where that is divided, with its weights gathered."""
    found: Result = getattr(module, _METHOD)(compute) if hasattr(module, _METHOD) else compute()
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, where it is divided or summed up in parts, all of it; every rank must ask."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != tensor.device_mesh.device_type:  # kept on the CPU, gathered on the device
        tensor = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(tensor, DTensor)
    found: torch.Tensor = tensor.full_tensor()
    return found


def divided_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor on the parameter's device; where that is divided and has the same shape, this rank's part of it."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor.to(parameter.device)
    mesh = parameter.device_mesh
    part = distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return part.to(parameter.device)
