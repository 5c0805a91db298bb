"""Weights as they travel through Ray's object store: plain numpy arrays, which are shared and not copied.

In: tensors on any device. Out: arrays that view them, or hold them where they came from a GPU; and the way back. (A
dict of torch tensors is pickled by Ray tensor by tensor, which takes forty times as long.)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]]
"""By name: the bytes, the torch dtype's name, the shape."""


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """The bytes of each tensor, without a copy on the CPU."""
    import torch

    return {
        name: (
            tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy(),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
        )
        for name, tensor in tensors.items()
    }


def to_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Tensors over the same bytes, which must not be written."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {
            name: torch.from_numpy(bytes_).view(getattr(torch, dtype)).reshape(shape)
            for name, (bytes_, dtype, shape) in arrays.items()
        }
