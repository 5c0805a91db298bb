"""Attention of one step over the slots: writes the step's keys and values, then attends.

In: per layer, the step's queries, keys and values (rotary applied). Out: attention output per row. The rows of a step
are the decode rows (row r belongs to slot r, so that keys and values are read in place as contiguous slices, not
gathered; what several have in common is read of one of them), then segments of prompts, then padding.

Shape suffixes: N rows of the step, B decode rows, L bucketed KV length, H query heads, K key-value heads, G = H / K,
D head size, E size of the values, M rows of a fixed-shape chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from sharpen.engine.embedded.kv import LENGTH_BUCKET, KVLayout, KVPool, KVShape, LayerKV
from sharpen.engine.embedded.products import AttentionRule, CommonKeys, KeyBlock, products, products_in_blocks
from sharpen.models.blockwise import ALL, CAUSAL, Scores, Sight, attend, merge, merge_sinks, window_block, window_mask
from sharpen.models.marks import BothWays

# Attention of a segment of a prompt over the keys of its slot, in blocks.
#
# In: the segment's queries, and its slot's keys and values up to its end. Out: the attention output per row. Neither
# scores nor masks of all queries over all keys are ever in memory: with full attention, the fused kernel computes the
# earlier keys without a mask and the segment's own keys causally; with a sliding window, blocks of queries read only
# the keys in their windows, so that a token's cost does not depend on the length of the prompt. Attention in chunks is
# full attention in each of them.
#
# Shape suffixes: N rows of the segment, L rows of a block, S keys of a block, H query heads, K key-value heads, D key
# size, E value size.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Decode rows `rows` (slots, by number) that have the same keys at positions `first` .. `end` - 1. Those of one row
    are next to each other: they begin at 0, or where others of its end."""

    rows: tuple[int, ...]
    first: int
    end: int


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
        shared: Sequence[SharedPrefix] = (),
        both_ways: BothWays = "",
    ) -> None:
        """`shared`: keys of decode rows that may be read once for several. `both_ways`: in which layers the segments'
        blocks attend both ways."""
        self._pool = pool
        self._both_ways = both_ways
        self._places = pool.places(slot_N, position_N)
        self._position_N = position_N
        self._num_decode = num_decode
        self._wanted, self._kv_length = kv_length, pool.readable(kv_length)
        self._segments = segments
        self._shared = [(one, torch.tensor(one.rows, device=position_N.device)) for one in shared]
        self._reads: dict[bool, list[_Read]] = {}
        """What the decode rows read of their slots, without or with common keys beside."""
        self._copies: dict[tuple[str, int, torch.Size], torch.Tensor] = {}
        self._decode_masks: dict[tuple[int | None, bool, int], torch.Tensor] = {}
        self._prompts = PromptAttention()

    def attend(
        self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKE: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Write the rows' keys and values, then attend. The output of padding rows is zero."""
        kv = self._pool.write(layer, self._places, k_NKD, v_NKE)
        num_rows, heads, _ = q_NHD.shape
        num_decode = self._num_decode
        if num_decode == num_rows:
            return self._decode(kv, q_NHD, rule)
        out = q_NHD.new_zeros(num_rows, heads * v_NKE.shape[2])
        if num_decode:
            out[:num_decode] = self._decode(kv, q_NHD[:num_decode], rule)
        for segment in self._segments:
            rows = slice(segment.first_row, segment.first_row + segment.end - segment.start)
            keys, values = kv.of_slot(segment.slot, segment.end)
            seen = SlotKeys(keys_KDT=keys, values_KTE=values)
            out[rows] = self._prompts.attend(q_NHD[rows], seen, rule)
            if segment.blocks and (self._both_ways == "everywhere" or rule.window is not None):
                for first, end in segment.blocks:
                    inside = slice(segment.first_row + first - segment.start, segment.first_row + end - segment.start)
                    out[inside] = self._prompts.attend_both_ways(q_NHD[inside], seen.since(0, end), rule)
        return out

    def _decode(self, kv: LayerKV, q_BHD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        if rule.window is not None and self._kv_length > 2 * rule.window:
            return self._decode_window(kv, q_BHD, rule, rule.window)
        common = [] if rule.window is not None else list(self._common(kv))
        reads = self._own(kv, beside=bool(common))
        mask = self._decode_mask(rule, kv, reads, q_BHD.dtype)
        return _attend_rows(q_BHD, self._seen(kv, reads), mask, rule, common)

    def _seen(self, kv: LayerKV, reads: Sequence[_Read]) -> Iterator[KeyBlock]:
        """Yield the keys and values that are read. The later part of a block is copied in rows, much faster than a
        product copies it."""
        for one in reads:
            ((block, at),) = kv.parts(one.first, one.end)
            keys, values = block.keys_SKDT[one.rows, :, :, at], block.values_SKTE[one.rows, :, at]
            if at.start:
                keys, values = self._copied("keys", one, keys.mT).mT, self._copied("values", one, values)
            span = slice(one.rows.start * kv.num_heads, one.rows.stop * kv.num_heads)
            yield KeyBlock(span=span, keys=keys.flatten(0, 1), values=values.flatten(0, 1))

    def _copied(self, kind: str, of: _Read, part: torch.Tensor) -> torch.Tensor:
        """Copy a part into memory that all layers use: the pages of fresh memory take longer than the copy."""
        key = kind, of.first, part.shape
        if key not in self._copies:
            self._copies[key] = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        return self._copies[key].copy_(part)

    def _common(self, kv: LayerKV) -> Iterator[CommonKeys]:
        for one, row_M in self._shared:
            keys, values = kv.of_slot(one.rows[0], one.end, first=one.first)
            yield CommonKeys(row_M=row_M, first=one.first, keys=keys, values=values)

    def _own(self, kv: LayerKV, *, beside: bool) -> list[_Read]:
        """Return what is read of the decode rows' own slots: all that they have come to, `beside` common keys the
        rest."""
        if beside not in self._reads:
            position_B = self._position_N[: self._num_decode]
            first_B = torch.zeros_like(position_B) if beside else None
            if first_B is not None:
                for one, row_M in self._shared:
                    first_B[row_M] = first_B[row_M].clamp_min(one.end)
            self._reads[beside] = list(_reads(kv, position_B, first_B, self._kv_length, self._wanted))
        return self._reads[beside]

    def _decode_window(self, kv: LayerKV, q_BHD: torch.Tensor, rule: AttentionRule, window: int) -> torch.Tensor:
        """Gather each row's last `window` keys, so that the cost does not grow with the length."""
        num_rows = q_BHD.shape[0]
        row_B = torch.arange(num_rows, device=q_BHD.device)
        first_B = (self._position_N[:num_rows] - window + 1).clamp_min(0)
        if len(kv.blocks) == 1:
            block, width = kv.blocks[0], window
            keys = block.keys_SKDT.unfold(3, window, 1)[row_B, :, :, first_B]
            values = block.values_SKTE.unfold(2, window, 1)[row_B, :, first_B].transpose(2, 3)
        else:  # whole blocks, from the one in which the window begins
            first_B = first_B // kv.block_length * kv.block_length
            keys, values = _gathered(kv, first_B // kv.block_length, (window - 2) // kv.block_length + 2)
            width = keys.shape[3]
        mask = self._decode_masks.get((window, rule.chunks, kv.num_heads))
        if mask is None:
            key_at = first_B[:, None] + torch.arange(width, device=q_BHD.device)
            mask = _row_mask(_hidden(self._position_N[:num_rows, None], key_at, rule), kv, q_BHD.dtype)
            self._decode_masks[(window, rule.chunks, kv.num_heads)] = mask
        return _attend_rows(q_BHD, [_all_rows(keys, values)], mask, rule)

    def _decode_mask(
        self, rule: AttentionRule, kv: LayerKV, reads: Sequence[_Read], dtype: torch.dtype
    ) -> torch.Tensor:
        mask = self._decode_masks.get((rule.window, rule.chunks, kv.num_heads))
        if mask is None:
            key_at = torch.cat([torch.arange(one.first, one.end, device=self._position_N.device) for one in reads])
            hidden = _hidden(self._position_N[: self._num_decode, None], key_at, rule)
            for one, row_M in self._shared if rule.window is None else ():
                hidden[row_M] |= key_at < one.end
            mask = self._decode_masks[(rule.window, rule.chunks, kv.num_heads)] = _row_mask(hidden, kv, dtype)
        return mask


def _row_mask(hidden_BL: torch.Tensor, kv: LayerKV, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of rows, shape [B * K, 1, L]."""
    return _additive_mask(hidden_BL, dtype).repeat_interleave(kv.num_heads, dim=0).unsqueeze(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """Positions `first` .. `end` - 1 of a block, read of slots `rows`."""

    rows: slice
    first: int
    end: int


def _reads(
    kv: LayerKV, position_B: torch.Tensor, first_B: torch.Tensor | None, kv_length: int, wanted: int
) -> Iterator[_Read]:
    """Yield what is read of each block: of the rows from the first to the last that have come to it and read some of
    it, from the first position that one of them reads (`first_B`; None: all read all) if that is not in its first half:
    a part is copied, at a time that less saves, and ends with the positions that are `wanted`. The first block alone is
    read without a look at the positions, which would wait for a GPU."""
    for number, (block, at) in enumerate(kv.parts(0, kv_length)):
        start = number * kv.block_length
        rows, first = slice(0, len(position_B)), start
        if number or first_B is not None:
            reads_B = position_B >= start
            if first_B is not None:
                reads_B &= first_B < start + block.length
            row_M = reads_B.nonzero()
            if not len(row_M):
                continue
            rows = slice(int(row_M[0]), int(row_M[-1]) + 1)
            earliest = start if first_B is None else int(first_B[reads_B].min())
            first = earliest if earliest - start >= block.length // 2 else start
        yield _Read(rows=rows, first=first, end=start + at.stop if first == start else min(start + at.stop, wanted))


def _all_rows(keys_BKDL: torch.Tensor, values_BKLE: torch.Tensor) -> KeyBlock:
    return KeyBlock(span=slice(None), keys=keys_BKDL.flatten(0, 1), values=values_BKLE.flatten(0, 1))


def _gathered(kv: LayerKV, number_B: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of the keys [B, K, D, T] and values [B, K, T, E] of `count` blocks of each row from its block
    `number_B` on. Blocks that there are not are zero."""
    first, size, num_rows = kv.blocks[0], kv.block_length, len(number_B)
    _, heads, key_size, _ = first.keys_SKDT.shape
    keys = first.keys_SKDT.new_zeros(num_rows, heads, count * size, key_size).mT
    values = first.values_SKTE.new_zeros(num_rows, heads, count * size, first.values_SKTE.shape[3])
    for number in sorted(set(number_B.tolist())):
        row_M = (number_B == number).nonzero().squeeze(1)
        for place, block in enumerate(kv.blocks[number : number + count]):
            at = slice(place * size, place * size + block.length)
            keys[row_M, :, :, at] = block.keys_SKDT[row_M]
            values[row_M, :, at] = block.values_SKTE[row_M]
    return keys, values


def _attend_rows(
    q_BHD: torch.Tensor,
    blocks: Iterable[KeyBlock],
    mask: torch.Tensor,
    rule: AttentionRule,
    common: Sequence[CommonKeys] = (),
) -> torch.Tensor:
    """Attend with one query per row: keys and values of B * K entries, additive mask [B * K, 1, L], and what rows have
    in `common`."""
    num_rows, _, head_dim = q_BHD.shape
    q = q_BHD.reshape(len(mask), -1, head_dim)
    sinks = None if rule.sinks_H is None else rule.sinks_H.repeat(num_rows).view(q.shape[0], -1, 1)
    first, *others = blocks
    if others or common:
        return products_in_blocks(q, (first, *others), common, mask, rule, sinks).view(num_rows, -1)
    return products(q, first.keys, first.values, mask, rule, sinks).view(num_rows, -1)


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
        self._places = pool.places(slot_M, position_M)
        self._kv_length = kv_length

    def attend(
        self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKE: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Write the rows' keys and values, then attend. Rows are gathered a few at a time: a number that depends on the
        length alone, so that the shape of a row's product does too."""
        kv = self._pool.write(layer, self._places, k_NKD, v_NKE)
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
        keys, values = kv.of_slots(self._slot_M[rows], first, self._kv_length)
        key_at = torch.arange(first, self._kv_length, device=q_NHD.device)
        mask = _row_mask(_hidden(self._position_M[rows, None], key_at, rule), kv, q_NHD.dtype)
        return _attend_rows(q_NHD, [_all_rows(keys, values)], mask, rule)
