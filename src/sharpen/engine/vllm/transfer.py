"""Transfer of new weights to vLLM's workers on the trainer's own GPU, by CUDA IPC handles.

In: tensors on one GPU (the trainer), or the packed handles (a worker). Out: a text with handles to the memory, and
tensors that are that memory. A trial is sent first, whose values the worker checks: a driver, a container or an
allocator may not allow it, or the worker may be on another GPU (see `inference.vllm.loading`).
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping

import torch

TRIAL = (3.0, 1.0, 4.0)
_DEVICE = 6  # position of the GPU's index in torch's handle arguments; a worker may have another index for the GPU


class OtherPlaceError(RuntimeError):
    """The tensors are on another GPU than the reader."""


def only_gpu(tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
    """Return the GPU that all tensors are on, or None if there is no such GPU."""
    devices = {tensor.device for tensor in tensors.values()}
    device = next(iter(devices))
    return device if len(devices) == 1 and device.type == "cuda" else None


def pack(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return handles to the memory of contiguous tensors on one GPU, which must not change until they are read."""
    from torch.multiprocessing.reductions import reduce_tensor

    device = next(iter(tensors.values())).device
    torch.cuda.synchronize(device)
    handles = [(name, reduce_tensor(tensor)[1]) for name, tensor in tensors.items()]  # type: ignore[no-untyped-call]
    return base64.b64encode(pickle.dumps((_identity(device), handles))).decode()


def unpack(packed: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Open packed tensors in another process, and yield them one by one. Raises `OtherPlaceError` if they are on
    another GPU than `device`, `RuntimeError` if they cannot be opened."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    identity, handles = pickle.loads(base64.b64decode(packed))
    if identity != (own := _identity(device)):
        raise OtherPlaceError(f"the weights are on {identity}, the engine computes on {own}")
    for name, arguments in handles:
        own_arguments = [*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :]]
        yield name, rebuild_cuda_tensor(*own_arguments)  # type: ignore[no-untyped-call]


def trial(device: torch.device) -> torch.Tensor:
    """Return the tensor of the trial."""
    return torch.tensor(TRIAL, device=device)


def try_to_read(packed: str, device: torch.device) -> tuple[bool, str]:
    """Read the trial. Return whether it is on another GPU, and why it cannot be read (empty if it can)."""
    try:
        ((_, tensor),) = unpack(packed, device)
        values = tuple(tensor.tolist())
    except OtherPlaceError as error:
        return True, str(error)
    except (RuntimeError, AssertionError, ValueError) as error:  # the last two: a torch without CUDA, no GPU
        return False, str(error).splitlines()[0]
    return False, "" if values == TRIAL else f"{values} was read where {TRIAL} was written"


def _identity(device: torch.device) -> str:
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"
