"""Weights in Ray's object store, as plain numpy arrays, which readers share without a copy.

In: tensors on any device. Out: arrays that view them (a copy for tensors on a GPU), and tensors that view arrays. Ray
would pickle a dict of torch tensors one by one, which takes forty times as long.
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
"""Name -> (bytes, name of the torch dtype, shape)."""


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Return the bytes of each tensor, without a copy for tensors on the CPU."""
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
    """Return tensors that view the same bytes. They must not be written to."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {
            name: torch.from_numpy(bytes_).view(getattr(torch, dtype)).reshape(shape)
            for name, (bytes_, dtype, shape) in arrays.items()
        }
