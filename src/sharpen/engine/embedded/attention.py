"""Attention of one step over the slots: writes the step's keys and values, then attends.

In: per layer, the step's queries, keys and values (rotary applied). Out: attention output per row. The rows of a step
are the decode rows (row r belongs to slot r, so that keys and values are read in place as contiguous slices, not
gathered), then segments of prompts (`prompts.py`), then padding.

Shape suffixes: N rows of the step, B decode rows, L bucketed KV length, H query heads, K key-value heads, G = H / K,
D head size, E size of the values, M rows of a fixed-shape chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sharpen.engine.embedded.kv import LENGTH_BUCKET, KVLayout, KVPool, KVShape, LayerKV
from sharpen.engine.embedded.products import AttentionRule, products
from sharpen.engine.embedded.prompts import PromptAttention, SlotKeys
from sharpen.models.marks import BothWays

_MAX_GATHERED = 1 << 25
"""Elements of keys and values that the deterministic mode gathers at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSegment:
    """Consecutive rows of the step from `first_row` on: positions `start` .. `end` - 1 of the sequence in `slot`.

    `blocks` are the positions (first, end) among them whose tokens attend to each other both ways.
    """

    slot: int
    first_row: int
    start: int
    end: int
    blocks: tuple[tuple[int, int], ...] = ()


class StepAttention(Protocol):
    """One step's attention: called once per layer, in order."""

    def attend(
        self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKE: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Return the attention output, shape [N, H * E]."""


def _additive_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask to add to scores: -inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _hidden(query_at: torch.Tensor, key_at: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Return where a key is hidden from a query: it is later, or (sliding window, chunk) too early."""
    hidden = key_at > query_at
    if rule.window is not None:
        first_seen = query_at // rule.window * rule.window if rule.chunks else query_at - rule.window + 1
        hidden |= key_at < first_seen
    return hidden


class LayoutProbe:
    """Finds out which keys and values the layers of a model have. What it returns as attention is zero."""

    def __init__(self) -> None:
        self._shapes: dict[int, KVShape] = {}
        self._owners: dict[int, int] = {}
        self._keys: dict[int, torch.Tensor] = {}

    def attend(
        self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKE: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Note the layer's shape, or whose keys it was given."""
        owner = next((other for other, keys in self._keys.items() if _place(keys) == _place(k_NKD)), None)
        if owner is not None:
            self._owners[layer] = owner
        else:
            self._keys[layer] = k_NKD  # kept, so that no other layer's are at its address
            _, heads, size = k_NKD.shape
            self._shapes[layer] = KVShape(num_heads=heads, key_size=size, value_size=v_NKE.shape[2])
        return q_NHD.new_zeros(len(q_NHD), q_NHD.shape[1] * v_NKE.shape[2])

    @property
    def layout(self) -> KVLayout:
        """What was found."""
        return KVLayout(shapes=self._shapes, owners=self._owners)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what identifies a view's memory, on the meta device too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


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
        both_ways: BothWays = "",
    ) -> None:
        """`both_ways`: in which layers the segments' blocks attend both ways."""
        self._pool = pool
        self._both_ways = both_ways
        self._slot_N = slot_N
        self._position_N = position_N
        self._num_decode = num_decode
        self._kv_length = kv_length
        self._segments = segments
        self._decode_masks: dict[tuple[int | None, bool, int], torch.Tensor] = {}
        self._prompts = PromptAttention()

    def attend(
        self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKE: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Write the rows' keys and values, then attend. The output of padding rows is zero."""
        kv = self._pool.write(layer, self._slot_N, self._position_N, k_NKD, v_NKE)
        num_rows, heads, _ = q_NHD.shape
        num_decode = self._num_decode
        if num_decode == num_rows:
            return self._decode(kv, q_NHD, rule)
        out = q_NHD.new_zeros(num_rows, heads * v_NKE.shape[2])
        if num_decode:
            out[:num_decode] = self._decode(kv, q_NHD[:num_decode], rule)
        for segment in self._segments:
            rows = slice(segment.first_row, segment.first_row + segment.end - segment.start)
            seen = SlotKeys(
                keys_KDT=kv.keys_SKDT[segment.slot, :, :, : segment.end],
                values_KTE=kv.values_SKTE[segment.slot, :, : segment.end],
            )
            out[rows] = self._prompts.attend(q_NHD[rows], seen, rule)
            if segment.blocks and (self._both_ways == "everywhere" or rule.window is not None):
                for first, end in segment.blocks:
                    inside = slice(segment.first_row + first - segment.start, segment.first_row + end - segment.start)
                    out[inside] = self._prompts.attend_both_ways(q_NHD[inside], seen.since(0, end), rule)
        return out

    def _decode(self, kv: LayerKV, q_BHD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        if rule.window is not None and self._kv_length > 2 * rule.window:
            return self._decode_window(kv, q_BHD, rule, rule.window)
        num_rows, length = q_BHD.shape[0], self._kv_length
        keys = kv.keys_SKDT[:num_rows, :, :, :length].flatten(0, 1)
        values = kv.values_SKTE[:num_rows, :, :length].flatten(0, 1)
        return _attend_rows(q_BHD, keys, values, self._decode_mask(rule, kv, q_BHD.dtype), rule)

    def _decode_window(self, kv: LayerKV, q_BHD: torch.Tensor, rule: AttentionRule, window: int) -> torch.Tensor:
        """Gather each row's last `window` keys, so that the cost does not grow with the length."""
        num_rows = q_BHD.shape[0]
        row_B = torch.arange(num_rows, device=q_BHD.device)
        first_B = (self._position_N[:num_rows] - window + 1).clamp_min(0)
        keys = kv.keys_SKDT.unfold(3, window, 1)[row_B, :, :, first_B].flatten(0, 1)
        values = kv.values_SKTE.unfold(2, window, 1)[row_B, :, first_B].transpose(2, 3).flatten(0, 1)
        mask = self._decode_masks.get((window, rule.chunks, kv.num_heads))
        if mask is None:
            key_at = first_B[:, None] + torch.arange(window, device=q_BHD.device)
            mask = _row_mask(_hidden(self._position_N[:num_rows, None], key_at, rule), kv, q_BHD.dtype)
            self._decode_masks[(window, rule.chunks, kv.num_heads)] = mask
        return _attend_rows(q_BHD, keys, values, mask, rule)

    def _decode_mask(self, rule: AttentionRule, kv: LayerKV, dtype: torch.dtype) -> torch.Tensor:
        mask = self._decode_masks.get((rule.window, rule.chunks, kv.num_heads))
        if mask is None:
            key_at = torch.arange(self._kv_length, device=self._position_N.device)
            hidden = _hidden(self._position_N[: self._num_decode, None], key_at, rule)
            mask = self._decode_masks[(rule.window, rule.chunks, kv.num_heads)] = _row_mask(hidden, kv, dtype)
        return mask


def _row_mask(hidden_BL: torch.Tensor, kv: LayerKV, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of rows, shape [B * K, 1, L]."""
    return _additive_mask(hidden_BL, dtype).repeat_interleave(kv.num_heads, dim=0).unsqueeze(1)


def _attend_rows(
    q_BHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Attend with one query per row: keys [B * K, D, L], values [B * K, L, D], additive mask [B * K, 1, L]."""
    num_rows, _, head_dim = q_BHD.shape
    q = q_BHD.reshape(keys.shape[0], -1, head_dim)
    sinks = None if rule.sinks_H is None else rule.sinks_H.repeat(num_rows).view(q.shape[0], -1, 1)
    return products(q, keys, values, mask, rule, sinks).view(num_rows, -1)


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
        self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKE: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Write the rows' keys and values, then attend. Rows are gathered a few at a time: a number that depends on the
        length alone, so that the shape of a row's product does too."""
        kv = self._pool.write(layer, self._slot_M, self._position_M, k_NKD, v_NKE)
        first = 0
        if rule.window is not None:  # a row's position is one of the last LENGTH_BUCKET
            first = max(0, self._kv_length - LENGTH_BUCKET - rule.window + 1) // LENGTH_BUCKET * LENGTH_BUCKET
        size = len(q_NHD)
        while size > 1 and size * kv.num_elements * (self._kv_length - first) > _MAX_GATHERED:
            size //= 2
        outs = [
            self._attend_rows(kv, q_NHD[row : row + size], slice(row, row + size), first, rule)
            for row in range(0, len(q_NHD), size)
        ]
        return torch.cat(outs)

    def _attend_rows(
        self, kv: LayerKV, q_NHD: torch.Tensor, rows: slice, first: int, rule: AttentionRule
    ) -> torch.Tensor:
        """Attend over the keys of positions `first` .. L - 1."""
        slot_N, seen = self._slot_M[rows], slice(first, self._kv_length)
        keys = kv.keys_SKDT[:, :, :, seen].index_select(0, slot_N).flatten(0, 1)
        values = kv.values_SKTE[:, :, seen].index_select(0, slot_N).flatten(0, 1)
        key_at = torch.arange(first, self._kv_length, device=slot_N.device)
        hidden = _hidden(self._position_M[rows, None], key_at, rule)
        return _attend_rows(q_NHD, keys, values, _row_mask(hidden, kv, q_NHD.dtype), rule)
