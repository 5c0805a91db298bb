"""Shards a model's weights over ranks with PyTorch's FSDP2, layer by layer.

In: a whole model on the CPU and the ranks. Out: the same model, with a shard of every weight on each rank's device; the
weights of a layer are gathered while it computes. Gradients are summed over the ranks, not averaged: the loss weights
are already normalized over the whole update.

With `bfloat16`, the weights of a layer are gathered and used in it, and gradients are summed in fp32; the shards, which
the optimizer updates, are fp32. Embeddings, the last norm and the output layer are gathered in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from sharpen.models.modules import decoder_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")

_METHOD = "sharpen_compute"


def shard(module: Any, mesh: DeviceMesh, *, dtype: torch.dtype, cpu_offload: bool, keep_head: bool) -> None:
    """Shard a Hugging Face causal model, which computes in `dtype`, over a mesh of one dimension. `keep_head` keeps
    embeddings and output layer gathered between passes, so that they can be used outside of them.

    From then on, the model may only compute within `one_pass`.
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    policy = MixedPrecisionPolicy()
    if dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Towers are gathered with the embeddings: only the ranks that have images compute them.
    for layer in [part for part in decoder_of(module).modules() if isinstance(part, GradientCheckpointingLayer)]:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True, **settings)
    fully_shard(module, reshard_after_forward=not keep_head, **settings)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    setattr(module, _METHOD, lambda compute: compute())
    register_fsdp_forward_method(module, _METHOD)


def one_pass(module: Any, compute: Callable[[], Result]) -> Result:
    """Run `compute`, which uses parts of the module and returns a tuple of tensors, as one forward pass of the module,
    so that FSDP gathers the weights of a sharded one."""
    result: Result = getattr(module, _METHOD)(compute) if hasattr(module, _METHOD) else compute()
    return result


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor, and others as they are."""
    own: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own


def sum_over_shards(number: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up what each rank has made of its shards of these tensors; of tensors that are whole, return what it is.
    Every rank must call this."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            assert all(placement.is_shard() for placement in tensor.placements), "gradients are sharded as weights are"
            mesh = tensor.device_mesh
            return whole(DTensor.from_local(number.to(mesh.device_type), mesh, [Partial()])).to(number.device)
    return number


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor, or add up its partial sums; return others as they are. Every rank must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != tensor.device_mesh.device_type:  # kept on the CPU, gathered on the device
        tensor = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(tensor, DTensor)
    full: torch.Tensor = tensor.full_tensor()
    return full


def shard_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Move a tensor to the parameter's device. If that is sharded and of the same shape, return this rank's shard."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor.to(parameter.device)
    mesh = parameter.device_mesh
    sharded = distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return sharded.to(parameter.device)
