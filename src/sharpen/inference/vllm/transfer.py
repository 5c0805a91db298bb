"""New weights that vLLM's workers read from the trainer's GPU where it is theirs too, by CUDA's IPC handles.

In: tensors on one GPU (the side that has them), or what that side packed (a worker). Out: a text that carries handles
to the memory, and tensors that are that memory. What is sent first is a trial, whose values the worker tells: a driver,
a container or an allocator may not allow it, or the GPU be another one (`inference.vllm.loading` says what then).
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping

import torch

TRIAL = (3.0, 1.0, 4.0)
_DEVICE = 6  # place of the GPU's number in what torch needs to open a tensor; it may be another one in a worker


class OtherPlaceError(RuntimeError):
    """What is to be read is on another GPU than the reader."""


def only_gpu(tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
    """The GPU that all tensors are on, if there is one."""
    devices = {tensor.device for tensor in tensors.values()}
    device = next(iter(devices))
    return device if len(devices) == 1 and device.type == "cuda" else None


def pack(tensors: Mapping[str, torch.Tensor]) -> str:
    """Handles to the memory of contiguous tensors on one GPU, which must stay as they are until all are read."""
    from torch.multiprocessing.reductions import reduce_tensor

    device = next(iter(tensors.values())).device
    torch.cuda.synchronize(device)
    handles = [(name, reduce_tensor(tensor)[1]) for name, tensor in tensors.items()]  # type: ignore[no-untyped-call]
    return base64.b64encode(pickle.dumps((_identity(device), handles))).decode()


def unpack(packed: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors themselves, in another process, one after the other. Raises `OtherPlaceError` if they are on another
    GPU than `device`, `RuntimeError` if they cannot be opened."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    identity, handles = pickle.loads(base64.b64decode(packed))
    if identity != (own := _identity(device)):
        raise OtherPlaceError(f"the weights are on {identity}, the engine computes on {own}")
    for name, arguments in handles:
        here = [*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :]]
        yield name, rebuild_cuda_tensor(*here)  # type: ignore[no-untyped-call]


def trial(device: torch.device) -> torch.Tensor:
    """What is sent first."""
    return torch.tensor(TRIAL, device=device)


def try_to_read(packed: str, device: torch.device) -> tuple[bool, str]:
    """Whether the trial is on another GPU, and why it cannot be read here; empty if it can."""
    try:
        ((_, tensor),) = unpack(packed, device)
        found = tuple(tensor.tolist())
    except OtherPlaceError as error:
        return True, str(error)
    except (RuntimeError, AssertionError, ValueError) as error:  # the last two: a torch without CUDA, no GPU
        return False, str(error).splitlines()[0]
    return False, "" if found == TRIAL else f"{found} was read where {TRIAL} was written"


def _identity(device: torch.device) -> str:
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"
