"""Attention of a block of queries over a block of keys, in parts that are merged.

In: queries (1, H, L, D), keys (1, K, S, D), values (1, K, S, D). Out: the output (1, H, L, D) and, for each query, the
log-sum-exp of its scores (1, H, L). Parts of the same queries over different keys are merged by it, so no more scores
than those of one block are ever in memory. A sink is one more key, with a learned score and a value of zero.

There are two kernels with the same result: PyTorch's fused one (CPU), and plain products (soft-capped scores, and other
devices). The backward pass of a part takes the output and log-sum-exp after merging: its probabilities are
exp(score - lse), independent of the other parts and of the sink.

Shape suffixes: H query heads, K key-value heads, G = H / K, L queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How scores are computed from queries and keys: scaled, then soft-capped: cap * tanh(score / cap)."""

    scale: float
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Which keys of a block its queries see: all, or with `causal` (L = S) those up to their own, or those where
    `mask_LS`, which is added to the scores, is not -inf. Every query sees at least one."""

    causal: bool = False
    mask_LS: torch.Tensor | None = None


ALL = Sight()
CAUSAL = Sight(causal=True)


def is_fused(query: torch.Tensor, scores: Scores) -> bool:
    """Whether PyTorch's fused kernel computes these scores."""
    return query.device.type == "cpu" and scores.softcap is None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, sight: Sight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp. The last dimension of all inputs must be contiguous."""
    if is_fused(query, scores):
        with _fused_precision():
            out, lse = _attend(
                query, key, value, 0.0, sight.causal, attn_mask=_mask_4d(sight.mask_LS), scale=scores.scale
            )
        return out, lse
    _, num_heads, num_queries, _ = query.shape
    scores_KGLS, _ = _plain_scores(query, key, scores, sight)
    lse_KGL = scores_KGLS.logsumexp(dim=-1)
    probabilities = scores_KGLS.sub_(lse_KGL.unsqueeze(-1)).exp_().flatten(1, 2)
    out = torch.bmm(probabilities, value[0]).view(1, num_heads, num_queries, -1)
    return out, lse_KGL.reshape(1, num_heads, num_queries)


def attend_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scores: Scores,
    sight: Sight,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the part's gradients of query, key and value, given the merged output and log-sum-exp."""
    if is_fused(query, scores):
        with _fused_precision():
            grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _attend_backward(
                grad_out,
                query,
                key,
                value,
                out,
                lse,
                0.0,
                sight.causal,
                attn_mask=_mask_4d(sight.mask_LS),
                scale=scores.scale,
            )
        return grads
    scores_KGLS, capped_KGLS = _plain_scores(query, key, scores, sight)
    num_kv_heads, group = scores_KGLS.shape[:2]
    probabilities = scores_KGLS.sub_(lse.reshape(num_kv_heads, group, -1, 1)).exp_()
    delta = (grad_out * out).sum(dim=-1).view(num_kv_heads, group, -1, 1)
    grad_out_KXD = grad_out.reshape(num_kv_heads, -1, grad_out.shape[-1])
    grad_value = torch.bmm(probabilities.flatten(1, 2).transpose(1, 2), grad_out_KXD)
    grad_scores = torch.bmm(grad_out_KXD, value[0].transpose(1, 2)).view_as(probabilities).sub_(delta)
    grad_scores.mul_(probabilities)
    if capped_KGLS is not None:
        grad_scores.mul_(1 - capped_KGLS.square_())
    grad_scores = grad_scores.flatten(1, 2).mul_(scores.scale)
    grad_query = torch.bmm(grad_scores, key[0]).view_as(query)
    grad_key = torch.bmm(grad_scores.transpose(1, 2), _grouped(query, num_kv_heads))
    return grad_query, grad_key.unsqueeze(0), grad_value.unsqueeze(0)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a part into `out` and `lse`, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(part, (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def merge_sinks(out: torch.Tensor, lse: torch.Tensor, sinks_H: torch.Tensor) -> None:
    """Merge each head's sink into `out` and `lse`, in place."""
    total = torch.logaddexp(lse, sinks_H.to(lse.dtype)[None, :, None])
    out.mul_((lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def window_mask(
    num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the mask (L, S) to add to the scores of the last `num_queries` of `num_keys` consecutive positions: 0 for
    keys up to the query's own and, with `window`, among the last `window`; else -inf."""
    key_at = torch.arange(num_keys, device=device)
    query_at = key_at[num_keys - num_queries :, None]
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def window_block(window: int) -> int:
    """Return how many queries of a layer with a sliding window are computed at a time: each block reads that many keys
    and `window` more, so larger blocks waste products, and smaller ones calls."""
    return min(max(window, 128), 512)


def _plain_scores(
    query: torch.Tensor, key: torch.Tensor, scores: Scores, sight: Sight
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return masked scores (K, G, L, S) and, if they are soft-capped, the hyperbolic tangents."""
    num_kv_heads, num_queries, num_keys = key.shape[1], query.shape[2], key.shape[2]
    products = torch.bmm(_grouped(query, num_kv_heads), key[0].transpose(1, 2)).mul_(scores.scale)
    result, capped = products.view(num_kv_heads, -1, num_queries, num_keys), None
    if scores.softcap is not None:
        capped = result.div_(scores.softcap).tanh_()
        result = capped * scores.softcap
    mask_LS = sight.mask_LS
    if sight.causal:
        mask_LS = window_mask(num_queries, num_keys, None, result.dtype, result.device)
    return (result if mask_LS is None else result.add_(mask_LS)), capped


def _grouped(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return the queries that share a key head as rows of one matrix, shape (K, G * L, D)."""
    return query.reshape(num_kv_heads, -1, query.shape[-1])


def _mask_4d(mask_LS: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask_LS is None else mask_LS[None, None]


@contextmanager
def _fused_precision() -> Iterator[None]:
    """Use PyTorch's default matmul precision: with "medium", the small products in the fused kernel are 4 times
    slower."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
