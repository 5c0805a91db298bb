"""The gradient of a large table of embeddings, in one process on a processor: added to in place.

In: an embedding that trains, and the ids that it looks up. Out: their rows; in the backward pass the rows' gradients
are added to the table's. Autograd's own is a matrix as large as the table for each micro-batch, nearly all of it zeros,
and a second one while both uses of a tied table are added up: 0.6 GB each of 152,000 words in 1,024 numbers.

Shape suffixes: N ids, V vocabulary, C hidden size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable

LARGE_TABLE = 1 << 24
"""The numbers of a table from which on its gradient is added to in place: in another order, so that smaller ones train
as they always have, bit for bit."""


def is_added_in_place(weight_VC: torch.Tensor) -> bool:
    """Whether the gradient of a table is added to where it is: of a large one that trains on a CPU, in one process
    (others gather and divide gradients themselves)."""
    one_process = not (dist.is_available() and dist.is_initialized())
    plain = type(weight_VC.data) is torch.Tensor and weight_VC.is_cpu and weight_VC.dtype == torch.float32
    return plain and weight_VC.requires_grad and weight_VC.numel() >= LARGE_TABLE and one_process


def gradient_of(weight_VC: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a table, to be added to: zeros if it had none."""
    if weight_VC.grad is None:
        weight_VC.grad = torch.zeros_like(weight_VC)
    return weight_VC.grad


def look_up_in_place(embeddings: Any) -> None:
    """Let an embedding, if it is a plain one, look ids up in this way whenever `is_added_in_place` holds."""
    plain = type(embeddings) is torch.nn.Embedding and embeddings.max_norm is None and not embeddings.scale_grad_by_freq
    if plain:
        embeddings.forward = functools.partial(_look_up, embeddings, embeddings.forward)


def _look_up(embeddings: torch.nn.Embedding, own: Any, ids: torch.Tensor) -> torch.Tensor:
    if not (torch.is_grad_enabled() and is_added_in_place(embeddings.weight)):
        return own(ids)  # type: ignore[no-any-return]
    return _LookUp.apply(ids, embeddings.weight, embeddings.padding_idx)  # type: ignore[no-any-return, no-untyped-call]


class _LookUp(torch.autograd.Function):
    """Rows of a table. The padding's row has no gradient."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight_VC: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight_VC, ctx.padding = weight_VC, padding
        return torch.nn.functional.embedding(ids, weight_VC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ids_N = ids.reshape(-1)
        grad_NC = grad.reshape(len(ids_N), -1)
        if ctx.padding is not None:
            grad_NC = grad_NC.masked_fill((ids_N == ctx.padding)[:, None], 0)
        gradient_of(ctx.weight_VC).index_add_(0, ids_N, grad_NC)
        return None, None, None
