"""Transfer of weights to other processes of this machine: a safetensors file in memory, overwritten by each update.

In: tensors under their parameter names, always the same ones. Out: a path at which other processes read them. The file
has no name (`/proc/<pid>/fd/<number>`): it does not depend on the size of a container's `/dev/shm`, and nothing is left
if this process is killed. Linux only, like vLLM. Both sides keep their mapping, since mapping costs more than copying.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import torch

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
