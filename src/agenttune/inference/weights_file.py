"""Weights for other processes of this machine: a safetensors file in memory, mapped once, written over by each update.

In: tensors under their parameter names, always the same ones. Out: a path at which other processes read them. The file
has no name of its own (`/proc/<pid>/fd/<number>`), so that nothing is left behind if this process is killed.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

_SHARED = Path("/dev/shm")


class WeightsFile:
    """Written by one process, read by others, who are done reading when the next write begins."""

    def __init__(self, folder: Path) -> None:
        """Without room in shared memory the file is in `folder`."""
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._views: dict[str, torch.Tensor] = {}

    def write(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Path:
        """Write the tensors, in `dtype`; returns where they are until the next write."""
        if self._file is None:
            self._file = self._create(tensors, dtype)
        else:
            for name, view in self._views.items():
                view.copy_(tensors[name])
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._views.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _create(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> IO[bytes]:
        from safetensors.torch import save_file

        num_bytes = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
        fits = os.access(_SHARED, os.W_OK) and shutil.disk_usage(_SHARED).free > 2 * num_bytes
        path = (_SHARED if fits else self._folder) / f"{self._folder.name}.safetensors"
        try:
            save_file({name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}, path)
            file = path.open("r+b")
        finally:
            path.unlink(missing_ok=True)
        memory = mmap.mmap(file.fileno(), 0)
        start = 8 + int.from_bytes(memory[:8], "little")
        header = json.loads(memory[8:start])
        for name, tensor in tensors.items():
            offset = start + header[name]["data_offsets"][0]
            flat = torch.frombuffer(memory, dtype=dtype, count=tensor.numel(), offset=offset)
            self._views[name] = flat.view(tensor.shape)
        return file
