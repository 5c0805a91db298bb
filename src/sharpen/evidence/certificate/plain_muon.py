"""Muon, written out to repeat an update: the optimizer of the matrices in a model's blocks.

In: the moment of a matrix before and after an update. Out: the direction in which it moves. From Keller Jordan's
description (https://kellerjordan.github.io/posts/muon), with the scale that matches AdamW's (arXiv 2502.16982, equation
4). Nothing is shared with `trainer.update_rules` or torch's class.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor

KIND = "momentum_buffer"
"""The name of its moment."""
MOMENTUM = 0.95
_STEPS = 5
_SHIFT = 2.0**-16
"""As a part of each number: steps of bfloat16 are 2^-8 apart."""
_A, _B, _C = 3.4445, -4.7750, 2.0315


def turns(weight: Tensor) -> bool:
    """Whether this is a matrix, not a vector in the shape of one."""
    return weight.ndim == 2 and min(weight.shape) > 1


def direction(before: Tensor, after: Tensor) -> Tensor:
    """Return how a matrix moves for a rate of 1, given its moment before and after the update: Nesterov's step, with
    singular values near 1, and 0.2 as root of its mean square."""
    gradient = (after - MOMENTUM * before) / (1.0 - MOMENTUM)
    ahead = (1.0 - MOMENTUM) * gradient + MOMENTUM * after
    return 0.2 * math.sqrt(max(after.shape)) * _orthogonal(ahead)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Newton and Schulz, in bfloat16, as Muon makes them. They enlarge what is nearly 0 by hundreds, and
    what rounding makes of it too. To measure this, a matrix in float32 is rounded otherwise in one number of a hundred;
    one in float64 is not."""
    if matrix.dtype != torch.float64:
        shifts = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
        matrix = matrix * (1.0 + _SHIFT * shifts)
    now = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix).bfloat16()
    now = now / now.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = now @ now.T
        now = torch.addmm(now, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), now, beta=_A)
    return (now.T if matrix.shape[0] > matrix.shape[1] else now).to(matrix.dtype)
