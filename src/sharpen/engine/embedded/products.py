"""The attention of a layer by plain batched products, and the rule that it follows.

In: queries, keys, values, an additive mask. Out: the attention output.

Shape suffixes: H query heads, G query heads of a key head, K key heads, B rows, M some of them, X batch of the product
(B * K), D key size, E value size, L keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sharpen.engine.embedded.matmul import has_exact_products


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The parameters of a layer's attention: scale, sliding window, logit softcap, and the score of each head's sink (a
    key that every query sees, whose value is zero). A window of `chunks` does not slide: it begins at the last multiple
    of its length."""

    scale: float
    window: int | None = None
    chunks: bool = False
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None


def products(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Batched attention: queries [X, G, D], keys [X, D, L], values [X, L, E], additive mask broadcast to [X, G, L], and
    the sinks' scores [X, G, 1] if the rule has some.

    On a GPU that supports it, scores stay in fp32 even in half precision, as in the trainer's kernels.
    """
    return torch.bmm(_weights(_scores(q, keys, mask, rule), sinks, q.dtype), values)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlock:
    """Keys [Y, D, L] and values [Y, L, E] of entries `span` of a batched product, Y of its X. The rest sees none."""

    span: slice
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonKeys:
    """Keys [K, D, L] and values [K, L, E] that rows `row_M` of a step have in common, from position `first` on: no
    other keys of these positions are theirs."""

    row_M: torch.Tensor
    first: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def at(self) -> slice:
        """Their positions."""
        return slice(self.first, self.first + self.keys.shape[2])


def products_in_blocks(
    q: torch.Tensor,
    blocks: Sequence[KeyBlock],
    common: Sequence[CommonKeys],
    mask: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `products`, where keys and values come in blocks: masks [X, 1, L] for all of them, one after the other. Keys
    that rows have in common, which none of them may not see, are read once for all of their queries."""
    ends = list(itertools.accumulate((block.keys.shape[2] for block in blocks), initial=0))
    columns = [slice(start, end) for start, end in itertools.pairwise(ends)]
    scores = q.new_full((*q.shape[:2], ends[-1] + max((one.at.stop for one in common), default=0)), -torch.inf)
    for block, at in zip(blocks, columns, strict=True):
        scores[block.span, :, at] = _scores(q[block.span], block.keys, mask[block.span, :, at], rule)
    nothing = q.new_zeros(1, 1, 1)
    for one in common:
        found = _scores(_of_heads(q, one), one.keys, nothing, rule)
        _by_row(scores, one)[one.row_M, :, :, ends[-1] + one.at.start : ends[-1] + one.at.stop] = _of_rows(found, one)
    weights = _weights(scores, sinks, q.dtype)
    out = q.new_zeros(*q.shape[:2], blocks[0].values.shape[2], dtype=torch.float32)
    for block, at in zip(blocks, columns, strict=True):
        out[block.span] += torch.bmm(weights[block.span, :, at], block.values)
    for one in common:
        its = _of_heads(weights[:, :, ends[-1] + one.at.start : ends[-1] + one.at.stop], one)
        _by_row(out, one).index_add_(0, one.row_M, _of_rows(torch.bmm(its, one.values), one).float())
    return out.to(q.dtype)


def _by_row(of_entries: torch.Tensor, one: CommonKeys) -> torch.Tensor:
    """View what belongs to entries [B * K, G, X] of a product as [B, K, G, X]."""
    return of_entries.view(-1, len(one.keys), *of_entries.shape[1:])


def _of_heads(of_entries: torch.Tensor, one: CommonKeys) -> torch.Tensor:
    """Return what belongs to the rows of common keys, of entries [B * K, G, X], as [K, M * G, X]."""
    _, queries, width = of_entries.shape
    rows_MKGX = of_entries.reshape(-1, len(one.keys), queries, width).index_select(0, one.row_M)
    return rows_MKGX.transpose(0, 1).reshape(len(one.keys), -1, width)


def _of_rows(of_heads: torch.Tensor, one: CommonKeys) -> torch.Tensor:
    """The inverse of `_of_heads`: [K, M * G, X] as [M, K, G, X]."""
    return of_heads.view(len(one.keys), len(one.row_M), -1, of_heads.shape[2]).transpose(0, 1)


def _scores(q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    exact = q.is_cuda and has_exact_products(q.device, q.dtype)
    if rule.softcap is not None:
        scores = torch.bmm(q, keys, out_dtype=torch.float32) if exact else torch.bmm(q, keys)
        return scores.mul_(rule.scale / rule.softcap).tanh_() * rule.softcap + mask
    if exact:
        return torch.add(mask, torch.bmm(q, keys, out_dtype=torch.float32), alpha=rule.scale)
    return torch.baddbmm(mask, q, keys, alpha=rule.scale)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(dtype)
    with_sink = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    return torch.softmax(with_sink, dim=-1)[..., :-1].to(dtype)
