"""Attention of a segment of a prompt over the keys of its slot, in blocks.

In: the segment's queries, and its slot's keys and values up to its end. Out: the attention output per row. Neither
scores nor masks of all queries over all keys are ever in memory: with full attention, the fused kernel computes the
earlier keys without a mask and the segment's own keys causally; with a sliding window, blocks of queries read only the
keys in their windows, so that a token's cost does not depend on the length of the prompt. Attention in chunks is full
attention in each of them.

Shape suffixes: N rows of the segment, L rows of a block, S keys of a block, H query heads, K key-value heads, D key
size, E value size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from sharpen.engine.embedded.products import AttentionRule, products
from sharpen.models.blockwise import ALL, CAUSAL, Scores, Sight, attend, merge, merge_sinks, window_block, window_mask

_SMALL_SCORES = 100 * 160
"""Rows x keys up to which plain products are faster than the fused kernel."""

_BLOCK_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores (heads x rows x keys) of a block of plain products: on a CPU those that fit its cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotKeys:
    """The keys and values that a segment sees: positions 0 .. T - 1 of its slot, of which the last N are its own."""

    keys_KDT: torch.Tensor
    values_KTE: torch.Tensor

    @property
    def end(self) -> int:
        """The position after the segment's last one."""
        return self.keys_KDT.shape[2]

    def since(self, first: int, end: int) -> SlotKeys:
        """Return those of positions first .. end - 1."""
        return SlotKeys(keys_KDT=self.keys_KDT[:, :, first:end], values_KTE=self.values_KTE[:, first:end])


class PromptAttention:
    """Attends for the segments of one step, whose masks it keeps."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int, int | None, torch.dtype], torch.Tensor] = {}

    def attend(self, q_NHD: torch.Tensor, kv: SlotKeys, rule: AttentionRule) -> torch.Tensor:
        """Return the attention output, shape [N, H * E]."""
        if rule.window is not None and rule.chunks:
            return self._in_chunks(q_NHD, kv, rule, rule.window)
        num_rows, heads, _ = q_NHD.shape
        out = q_NHD.new_empty(num_rows, heads * kv.values_KTE.shape[2])
        start = kv.end - num_rows
        for rows, first in _blocks(q_NHD, start, rule):
            block = kv.since(first, start + rows.stop)
            out[rows] = self._block(q_NHD[rows], block, rule)
        return out

    def _in_chunks(self, q_NHD: torch.Tensor, kv: SlotKeys, rule: AttentionRule, size: int) -> torch.Tensor:
        """Attend in each chunk of `size` positions for itself, with full attention."""
        start, outs = kv.end - len(q_NHD), []
        within = replace(rule, window=None, chunks=False)
        for first in range(start // size * size, kv.end, size):
            rows = slice(max(first, start) - start, min(first + size, kv.end) - start)
            outs.append(self.attend(q_NHD[rows], kv.since(first, start + rows.stop), within))
        return torch.cat(outs)

    def attend_both_ways(self, q_NHD: torch.Tensor, kv: SlotKeys, rule: AttentionRule) -> torch.Tensor:
        """Attend with the queries of the last keys, each of which sees all keys that its window does not hide; shape
        [N, H * E]."""
        num_rows, heads, _ = q_NHD.shape
        budget = _BLOCK_SCORES.get(q_NHD.device.type, _BLOCK_SCORES["cpu"])
        size, outs = max(16, budget // (heads * kv.end)), []
        key_at = torch.arange(kv.end, device=q_NHD.device)
        for row in range(0, num_rows, size):
            query_at = key_at[kv.end - num_rows + row :][:size]
            hidden_LS = torch.zeros(len(query_at), kv.end, dtype=torch.bool, device=q_NHD.device)
            if rule.window is not None:
                hidden_LS = key_at <= query_at[:, None] - rule.window
            mask_LS = torch.zeros(hidden_LS.shape, dtype=q_NHD.dtype, device=q_NHD.device)
            outs.append(_products(q_NHD[row : row + size], kv, rule, mask_LS.masked_fill_(hidden_LS, -torch.inf)))
        return torch.cat(outs)

    def _block(self, q_LHD: torch.Tensor, kv: SlotKeys, rule: AttentionRule) -> torch.Tensor:
        """Attend with queries that belong to the last keys. Every query's window is within them."""
        num_rows = len(q_LHD)
        if _by_products(q_LHD, rule) or num_rows * kv.end <= _SMALL_SCORES:
            return self._plain(q_LHD, kv, rule)
        window = None if rule.window is None or kv.end <= rule.window else rule.window
        out_HLE = self._on_gpu(q_LHD, kv, rule, window) if q_LHD.is_cuda else self._fused(q_LHD, kv, rule, window)
        return out_HLE.transpose(0, 1).reshape(num_rows, -1)

    def _fused(self, q_LHD: torch.Tensor, kv: SlotKeys, rule: AttentionRule, window: int | None) -> torch.Tensor:
        """Attend with the fused kernel of the CPU, which needs keys of contiguous rows, as wide as the values."""
        width = max(q_LHD.shape[2], kv.values_KTE.shape[2])
        query, key, value = (
            _widened(tensor, width).unsqueeze(0)
            for tensor in (q_LHD.transpose(0, 1), kv.keys_KDT.transpose(1, 2).contiguous(), kv.values_KTE)
        )
        scores, earlier = Scores(scale=rule.scale), kv.end - len(q_LHD)
        if window is not None:
            mask_LS = self._mask(len(q_LHD), kv.end, window, query)
            out, lse = attend(query, key, value, scores, Sight(mask_LS=mask_LS))
        else:
            out, lse = attend(query, key[:, :, earlier:], value[:, :, earlier:], scores, CAUSAL)
            if earlier:
                part, part_lse = attend(query, key[:, :, :earlier], value[:, :, :earlier], scores, ALL)
                out = out.float()
                merge(out, lse, part.float(), part_lse)
        if rule.sinks_H is not None:
            merge_sinks(out, lse, rule.sinks_H)
        return out[0, :, :, : kv.values_KTE.shape[2]]

    def _on_gpu(self, q_LHD: torch.Tensor, kv: SlotKeys, rule: AttentionRule, window: int | None) -> torch.Tensor:
        """Attend with a fused kernel. Key heads are repeated, since no fused kernel takes a mask with fewer key heads
        than query heads, and the unfused way would hold all scores in memory."""
        group = q_LHD.shape[1] // kv.keys_KDT.shape[0]
        query = q_LHD.transpose(0, 1).unsqueeze(0)
        mask = (
            causal_lower_right(len(q_LHD), kv.end) if window is None else self._mask(len(q_LHD), kv.end, window, query)
        )
        return F.scaled_dot_product_attention(
            query,
            kv.keys_KDT.transpose(1, 2).repeat_interleave(group, dim=0).contiguous().unsqueeze(0),
            kv.values_KTE.repeat_interleave(group, dim=0).unsqueeze(0),
            attn_mask=mask,
            scale=rule.scale,
        )[0]

    def _plain(self, q_LHD: torch.Tensor, kv: SlotKeys, rule: AttentionRule) -> torch.Tensor:
        return _products(q_LHD, kv, rule, self._mask(len(q_LHD), kv.end, rule.window, q_LHD))

    def _mask(self, num_queries: int, num_keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        mask_LS = self._masks.get((num_queries, num_keys, window, like.dtype))
        if mask_LS is None:
            mask_LS = window_mask(num_queries, num_keys, window, like.dtype, like.device)
            self._masks[(num_queries, num_keys, window, like.dtype)] = mask_LS
        return mask_LS


def _products(q_LHD: torch.Tensor, kv: SlotKeys, rule: AttentionRule, mask_LS: torch.Tensor) -> torch.Tensor:
    """Attend by plain products, under a mask that is added to the scores."""
    num_rows, heads, head_dim = q_LHD.shape
    kv_heads = kv.keys_KDT.shape[0]
    group = heads // kv_heads
    q = q_LHD.reshape(num_rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    sinks = None if rule.sinks_H is None else rule.sinks_H.repeat_interleave(num_rows).view(kv_heads, -1, 1)
    out = products(q, kv.keys_KDT, kv.values_KTE, mask_LS.repeat(group, 1), rule, sinks)
    return out.view(kv_heads, group, num_rows, -1).permute(2, 0, 1, 3).reshape(num_rows, -1)


def _blocks(q_NHD: torch.Tensor, start: int, rule: AttentionRule) -> Iterator[tuple[slice, int]]:
    """Return the blocks of a segment from position `start` on: rows, and the first position that they see."""
    num_rows, heads, _ = q_NHD.shape
    end, window = start + num_rows, rule.window
    size = num_rows if window is None or end <= window else window_block(window)
    if _by_products(q_NHD, rule):
        budget = _BLOCK_SCORES.get(q_NHD.device.type, _BLOCK_SCORES["cpu"])
        size = min(size, max(16, budget // (heads * end)))
    for row in range(0, num_rows, size):
        first = 0 if window is None else max(0, start + row - window + 1)
        yield slice(row, min(row + size, num_rows)), first


def _by_products(q_NHD: torch.Tensor, rule: AttentionRule) -> bool:
    """Whether no fused kernel computes this rule: soft-capped scores, and sinks on a GPU."""
    return rule.softcap is not None or (rule.sinks_H is not None and q_NHD.device.type != "cpu")


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))
