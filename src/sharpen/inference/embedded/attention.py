"""Attention of one step over the slots: writes the step's keys and values, then attends.

In: per layer, the step's queries, keys and values (rotary applied). Out: attention output per row. The rows of a step
are the decode rows (row r belongs to slot r, so that keys and values are read in place as contiguous slices, not
gathered), then segments of prompts, then padding.

Shape suffixes: N rows of the step, B decode rows, L bucketed KV length, H query heads, K key-value heads, G = H / K,
D head size, M rows of a fixed-shape chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from sharpen.inference.embedded.kv import KVPool, LayerKV
from sharpen.inference.embedded.matmul import has_exact_products

_SMALL_SCORES = 100 * 160  # rows x keys up to which plain products are faster than the fused kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The parameters of a layer's attention: scale, sliding window, logit softcap."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSegment:
    """Consecutive rows of the step from `first_row` on: positions `start` .. `end` - 1 of the sequence in `slot`."""

    slot: int
    first_row: int
    start: int
    end: int


class StepAttention(Protocol):
    """One step's attention: called once per layer, in order."""

    def attend(
        self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Return the attention output, shape [N, H * D]."""


def _additive_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask to add to scores: -inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _hidden(query_at: torch.Tensor, key_at: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return where a key is hidden from a query: it is later, or (sliding window) too early."""
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    return hidden


class SlotAttention:
    """Attention of a step in the fast layout: decode rows as one batched product over slices, segments one by one."""

    def __init__(
        self,
        pool: KVPool,
        *,
        slot_N: torch.Tensor,
        position_N: torch.Tensor,
        num_decode: int,
        kv_length: int,
        segments: Sequence[SlotSegment],
    ) -> None:
        self._pool = pool
        self._slot_N = slot_N
        self._position_N = position_N
        self._num_decode = num_decode
        self._kv_length = kv_length
        self._segments = segments
        self._decode_masks: dict[int | None, torch.Tensor] = {}
        self._segment_masks: dict[tuple[int, int | None, int], torch.Tensor] = {}

    def attend(
        self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Write the rows' keys and values, then attend. The output of padding rows is zero."""
        kv = self._pool.layers[layer]
        kv.write(self._slot_N, self._position_N, k_NKD, v_NKD)
        num_rows, heads, head_dim = q_NHD.shape
        num_decode = self._num_decode
        if num_decode == num_rows:
            return self._decode(kv, q_NHD, rule)
        out = q_NHD.new_zeros(num_rows, heads * head_dim)
        if num_decode:
            out[:num_decode] = self._decode(kv, q_NHD[:num_decode], rule)
        for index, segment in enumerate(self._segments):
            rows = slice(segment.first_row, segment.first_row + segment.end - segment.start)
            out[rows] = self._segment(kv, q_NHD[rows], index, segment, rule)
        return out

    def _decode(self, kv: LayerKV, q_BHD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        num_rows, heads, head_dim = q_BHD.shape
        kv_heads = kv.keys_SKDT.shape[1]
        length = self._kv_length
        keys = kv.keys_SKDT[:num_rows].flatten(0, 1)[:, :, :length]
        values = kv.values_SKTD[:num_rows].flatten(0, 1)[:, :length]
        q = q_BHD.reshape(num_rows * kv_heads, heads // kv_heads, head_dim)
        out = _products(q, keys, values, self._decode_mask(rule.window, kv_heads, q.dtype), rule)
        return out.view(num_rows, heads * head_dim)

    def _decode_mask(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask of the decode rows, shape [B * K, 1, L]."""
        mask = self._decode_masks.get(window)
        if mask is None:
            key_at = torch.arange(self._kv_length, device=self._position_N.device)
            hidden = _hidden(self._position_N[: self._num_decode, None], key_at, window)
            mask = _additive_mask(hidden, dtype).repeat_interleave(kv_heads, dim=0).unsqueeze(1)
            self._decode_masks[window] = mask
        return mask

    def _segment(
        self, kv: LayerKV, q_NHD: torch.Tensor, index: int, segment: SlotSegment, rule: AttentionRule
    ) -> torch.Tensor:
        num_rows, heads, head_dim = q_NHD.shape
        kv_heads = kv.keys_SKDT.shape[1]
        keys = kv.keys_SKDT[segment.slot, :, :, : segment.end]
        values = kv.values_SKTD[segment.slot, :, : segment.end]
        group = heads // kv_heads
        fused = rule.softcap is None and num_rows * segment.end > _SMALL_SCORES
        if fused and q_NHD.is_cuda:
            return self._segment_on_gpu(q_NHD, keys, values, index, segment, rule)
        mask = self._segment_mask(index, segment, rule.window, 1 if fused else group, q_NHD.dtype)
        if fused:
            out_HND = F.scaled_dot_product_attention(
                q_NHD.transpose(0, 1).unsqueeze(0),
                keys.transpose(1, 2).contiguous().unsqueeze(0),
                values.unsqueeze(0),
                attn_mask=mask,
                scale=rule.scale,
                enable_gqa=heads != kv_heads,
            )[0]
            return out_HND.transpose(0, 1).reshape(num_rows, heads * head_dim)
        q = q_NHD.reshape(num_rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        out = _products(q, keys, values, mask, rule)
        return out.view(kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3).reshape(num_rows, heads * head_dim)

    def _segment_on_gpu(
        self,
        q_NHD: torch.Tensor,
        keys_KDT: torch.Tensor,
        values_KTD: torch.Tensor,
        index: int,
        segment: SlotSegment,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Attend with a fused kernel. Key heads are repeated, since no fused kernel takes a mask with fewer key heads
        than query heads, and the unfused way would hold all scores in memory. A segment from position 0 needs no mask.
        """
        num_rows, heads, head_dim = q_NHD.shape
        group = heads // keys_KDT.shape[0]
        unmasked = segment.start == 0 and (rule.window is None or segment.end <= rule.window)
        out_HND = F.scaled_dot_product_attention(
            q_NHD.transpose(0, 1).unsqueeze(0),
            keys_KDT.transpose(1, 2).repeat_interleave(group, dim=0).contiguous().unsqueeze(0),
            values_KTD.repeat_interleave(group, dim=0).unsqueeze(0),
            attn_mask=None if unmasked else self._segment_mask(index, segment, rule.window, 1, q_NHD.dtype),
            is_causal=unmasked,
            scale=rule.scale,
        )[0]
        return out_HND.transpose(0, 1).reshape(num_rows, heads * head_dim)

    def _segment_mask(
        self, index: int, segment: SlotSegment, window: int | None, repeats: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the additive mask of a segment, shape [rows of the segment, its end], repeated along the rows."""
        mask = self._segment_masks.get((index, window, repeats))
        if mask is None:
            key_at = torch.arange(segment.end, device=self._position_N.device)
            mask = _additive_mask(_hidden(key_at[segment.start :, None], key_at, window), dtype).repeat(repeats, 1)
            self._segment_masks[(index, window, repeats)] = mask
        return mask


class FixedShapeAttention:
    """Attention of a chunk in the deterministic mode: M rows, each with its own gathered keys and values of one fixed
    length.

    Every row is its own entry of a batched product of fixed shape, so its bits depend on its own ids only: not on the
    slot, the neighbours, or whether its prefix was computed now or earlier.
    """

    def __init__(self, pool: KVPool, *, slot_M: torch.Tensor, position_M: torch.Tensor, kv_length: int) -> None:
        self._pool = pool
        self._slot_M = slot_M
        self._position_M = position_M
        self._kv_length = kv_length

    def attend(
        self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Write the rows' keys and values, then attend."""
        kv = self._pool.layers[layer]
        kv.write(self._slot_M, self._position_M, k_NKD, v_NKD)
        num_rows, heads, head_dim = q_NHD.shape
        kv_heads = kv.keys_SKDT.shape[1]
        keys = kv.keys_SKDT[:, :, :, : self._kv_length].index_select(0, self._slot_M).flatten(0, 1)
        values = kv.values_SKTD[:, :, : self._kv_length].index_select(0, self._slot_M).flatten(0, 1)
        key_at = torch.arange(self._kv_length, device=self._position_M.device)
        hidden = _hidden(self._position_M[:, None], key_at, rule.window)
        mask = _additive_mask(hidden, q_NHD.dtype).repeat_interleave(kv_heads, dim=0).unsqueeze(1)
        q = q_NHD.reshape(num_rows * kv_heads, heads // kv_heads, head_dim)
        return _products(q, keys, values, mask, rule).view(num_rows, heads * head_dim)


def _products(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Batched attention: queries [X, G, D], keys [X, D, L], values [X, L, D], additive mask broadcast to [X, G, L].

    On a GPU that supports it, scores stay in fp32 even in half precision, as in the trainer's kernels.
    """
    if q.is_cuda and rule.softcap is None and has_exact_products(q.device, q.dtype):
        exact = torch.add(mask, torch.bmm(q, keys, out_dtype=torch.float32), alpha=rule.scale)
        return torch.bmm(torch.softmax(exact, dim=-1).to(q.dtype), values)
    if rule.softcap is None:
        scores = torch.baddbmm(mask, q, keys, alpha=rule.scale)
    else:
        scores = torch.bmm(q, keys) * (rule.scale / rule.softcap)
        scores = scores.tanh_() * rule.softcap + mask
    return torch.bmm(torch.softmax(scores, dim=-1), values)
