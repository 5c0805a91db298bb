"""Transfer of new weights to vLLM's workers on the trainer's own GPU, by CUDA IPC handles.

In: tensors on one GPU (the trainer), or the packed handles (a worker). Out: a text with handles to the memory, and
tensors that are that memory. A trial is sent first, whose values the worker checks: a driver, a container or an
allocator may not allow it, or the worker may be on another GPU (see `engine.vllm.loading`).
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

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


# Transfer of weights to other processes of this machine: a safetensors file in memory, overwritten by each update.
#
# In: tensors under their parameter names, always the same ones. Out: a path at which other processes read them. The
# file has no name (`/proc/<pid>/fd/<number>`): it does not depend on the size of a container's `/dev/shm`, and nothing
# is left if this process is killed. Linux only, like vLLM. Both sides keep their mapping, since mapping costs more than
# copying.

_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightsFile:
    """A file written by one process and read by others, which must be done reading before the next write."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._views: dict[str, torch.Tensor] = {}

    def write(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Path:
        """Write the tensors, converted to `dtype`, and return the file's path. Raises `OSError` if memory is short, and
        `ValueError` for other names than the first time's."""
        if self._descriptor is None:
            self._descriptor = _create(tensors, dtype)
            self._views = map_file(_path(self._descriptor))
        if tensors.keys() != self._views.keys():
            raise ValueError(f"weights of other names than at first: {sorted(tensors.keys() ^ self._views.keys())[:3]}")
        for name, view in self._views.items():
            view.copy_(tensors[name])
        return _path(self._descriptor)

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._views.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def map_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of such a file by name. They share its memory: later writes change them."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    start = 8 + int.from_bytes(memory[:8], "little")
    tensors = {}
    for name, entry in json.loads(memory[8:start]).items():
        dtype, (begin, end) = _TYPES[entry["dtype"]], entry["data_offsets"]
        count = (end - begin) // dtype.itemsize
        tensors[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + begin).view(entry["shape"])
    return tensors


def _path(descriptor: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def _create(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> int:
    """Create the file, allocate its memory and write the header.

    Source: https://github.com/huggingface/safetensors, "Format".
    """
    name_of = {value: name for name, value in _TYPES.items()}
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * dtype.itemsize
        entries[name] = {"dtype": name_of[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    descriptor = os.memfd_create("sharpen-weights")
    try:
        os.posix_fallocate(descriptor, 0, 8 + len(header) + end)
        os.pwrite(descriptor, len(header).to_bytes(8, "little") + header, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
