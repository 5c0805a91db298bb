"""Attention of prompts and rows in blocks equals attention over everything at once, for every rule, and never holds as
much."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sharpen.engine.embedded.attention import (
    FixedShapeAttention,
    PromptAttention,
    SharedPrefix,
    SlotAttention,
    SlotKeys,
    SlotSegment,
    _blocks,
)
from sharpen.engine.embedded.kv import KVLayout, KVPool, in_blocks
from sharpen.engine.embedded.products import AttentionRule

SINKS_H = torch.tensor([0.5, -1.0, 2.0, 0.0])
FULL = [AttentionRule(scale=0.3), AttentionRule(scale=0.3, sinks_H=SINKS_H), AttentionRule(scale=0.3, softcap=2.0)]
IN_BLOCKS = pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 128), (torch.bfloat16, 8)])


def at_once(q_NHD: torch.Tensor, kv: SlotKeys, rule: AttentionRule) -> torch.Tensor:
    """The definition: all scores, their softmax with the sink, the sum of the values."""
    num_rows, heads, _ = q_NHD.shape
    group = heads // len(kv.keys_KDT)
    keys, values = kv.keys_KDT.repeat_interleave(group, 0), kv.values_KTE.repeat_interleave(group, 0)
    scores = torch.bmm(q_NHD.transpose(0, 1), keys) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = torch.arange(kv.end - num_rows, kv.end)[:, None] - torch.arange(kv.end)
    seen = (distance >= 0) & (distance < (rule.window or kv.end))
    if rule.window and rule.chunks:
        seen &= torch.arange(kv.end - num_rows, kv.end)[:, None] // rule.window == torch.arange(kv.end) // rule.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if rule.sinks_H is not None:
        scores = torch.cat([scores, rule.sinks_H[:, None, None].expand(-1, num_rows, 1)], dim=-1)
    probabilities = scores.softmax(-1)[:, :, : kv.end]
    return torch.bmm(probabilities, values).transpose(0, 1).reshape(num_rows, -1)


def random_inputs(num_rows: int, end: int, value_size: int = 8) -> tuple[torch.Tensor, SlotKeys]:
    torch.manual_seed(0)
    kv = SlotKeys(keys_KDT=torch.randn(2, 8, end), values_KTE=torch.randn(2, end, value_size))
    return torch.randn(num_rows, 4, 8), kv


@pytest.mark.parametrize(("num_rows", "end"), [(300, 300), (300, 1000), (5, 1000), (40, 100)])
@pytest.mark.parametrize("window", [None, 70, 150, 2000])
@pytest.mark.parametrize(
    "extra",
    [{}, {"softcap": 2.0}, {"sinks_H": SINKS_H}, {"softcap": 2.0, "sinks_H": SINKS_H}, {"chunks": True}],
)
def test_a_segment_in_blocks_equals_all_scores_at_once(num_rows: int, end: int, window: int | None, extra) -> None:
    """Break: leave out `merge`, `merge_sinks`, the +1 of a block's first key, or the window from its mask."""
    q_NHD, kv = random_inputs(num_rows, end)
    rule = AttentionRule(scale=0.3, window=window, **extra)
    torch.testing.assert_close(PromptAttention().attend(q_NHD, kv, rule), at_once(q_NHD, kv, rule))


@pytest.mark.parametrize("value_size", [4, 12])
@pytest.mark.parametrize("num_rows", [3, 300])
def test_values_may_be_narrower_or_wider_than_keys(value_size: int, num_rows: int) -> None:
    """Break: leave out `_widened`."""
    q_NHD, kv = random_inputs(num_rows, 400, value_size)
    rule = AttentionRule(scale=0.3)
    torch.testing.assert_close(PromptAttention().attend(q_NHD, kv, rule), at_once(q_NHD, kv, rule))


@pytest.mark.parametrize("start", [0, 30])
@pytest.mark.parametrize("window", [None, 25, 200])
def test_prompts_on_a_gpu_are_computed_as_on_a_cpu(start: int, window: int | None) -> None:
    """A prompt from its start and one behind a cached prefix, by the calls that are made on a GPU. Break: align the
    causal mask at the upper left."""
    q_NHD, kv = random_inputs(60, start + 60)
    rule = AttentionRule(scale=0.3, window=window)
    out_HNE = PromptAttention()._on_gpu(q_NHD, kv, rule, window)
    torch.testing.assert_close(out_HNE.transpose(0, 1).flatten(1), at_once(q_NHD, kv, rule))


def test_a_window_reads_no_more_keys_than_it_needs_however_long_the_prompt_is() -> None:
    """Break: let `first` be 0 in `_blocks`."""
    q_NHD, rule = torch.empty(2048, 4, 8), AttentionRule(scale=1.0, window=512)
    for start in (0, 14_000, 1_000_000):
        blocks = list(_blocks(q_NHD, start, rule))
        assert sum(rows.stop - rows.start for rows, _ in blocks) == 2048
        assert max(start + rows.stop - first for rows, first in blocks) <= 2 * 512
    capped = _blocks(q_NHD, 14_000, AttentionRule(scale=1.0, softcap=30.0))
    assert max((rows.stop - rows.start) * (14_000 + rows.stop) * 4 for rows, _ in capped) < 1 << 21


def filled_pool(length: int, dtype: torch.dtype = torch.float32, width: int = 8) -> KVPool:
    """Numbers of so many positions; in blocks if they are wide, or in half precision."""
    pool = KVPool(
        layout=KVLayout.uniform(1, 2, width),
        dtype=dtype,
        device=torch.device("cpu"),
        max_slots=4,
        max_length=length,
        budget_bytes=1 << 22,
    )
    pool.resize(4, length, kept=())
    torch.manual_seed(0)
    for block in pool.layers[0].blocks:
        block.keys_SKDT.normal_()
        block.values_SKTE.normal_()
    return pool


@pytest.mark.parametrize("width", [8, 128])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        AttentionRule(scale=0.3, window=50, sinks_H=SINKS_H),
        AttentionRule(scale=0.3, window=50, chunks=True),
        AttentionRule(scale=0.3, window=200, chunks=True),
        AttentionRule(scale=0.3),
    ],
)
def test_decoding_rows_see_the_last_keys_of_their_own_slots(
    deterministic: bool, rule: AttentionRule, width: int
) -> None:
    """Rows of several lengths, shorter than the window too. Break: gather from one position later, or from another than
    a chunk's first."""
    pool = filled_pool(320, width=width)
    assert len(pool.layers[0].blocks) == (2 if width == 128 else 1)
    position_N, slot_N = torch.tensor([300, 10, 49, 50]), torch.arange(4)
    if deterministic:  # one chunk has positions of one bucket
        position_N = torch.tensor([300, 256, 319, 290])
        attention = FixedShapeAttention(pool, slot_M=slot_N, position_M=position_N, kv_length=320)
    else:
        attention = SlotAttention(pool, slot_N=slot_N, position_N=position_N, num_decode=4, kv_length=320, segments=[])
    q, k, v = (torch.randn(4, heads, width) for heads in (4, 2, 2))
    out = attention.attend(0, q, k, v, rule)
    kv = pool.layers[0]
    for row, position in enumerate(position_N.tolist()):
        keys, values = kv.of_slot(row, position + 1)
        seen = SlotKeys(keys_KDT=keys, values_KTE=values)
        torch.testing.assert_close(out[row : row + 1], at_once(q[row : row + 1], seen, rule))


@IN_BLOCKS
@pytest.mark.parametrize(
    "rule", [*FULL, AttentionRule(scale=0.3, window=300), AttentionRule(scale=0.3, window=300, chunks=True)]
)
def test_rows_attend_over_several_blocks_of_the_cache(rule: AttentionRule, dtype: torch.dtype, width: int) -> None:
    """One row has come far, its neighbours have not; a last block of 64. Break: leave the first row of `_reads` out; in
    `places` do not subtract the block's first position; let `_gathered` take one block less."""
    pool = filled_pool(832, dtype, width)
    position_N, slot_N = torch.tensor([10, 820, 400, 767]), torch.arange(4)
    attention = SlotAttention(pool, slot_N=slot_N, position_N=position_N, num_decode=4, kv_length=832, segments=[])
    q, k, v = (torch.randn(4, heads, width).to(dtype) for heads in (4, 2, 2))
    sinks_H = None if rule.sinks_H is None else rule.sinks_H.to(dtype)
    out = attention.attend(0, q, k, v, replace(rule, sinks_H=sinks_H))
    for row, position in enumerate(position_N.tolist()):
        keys, values = (one.float() for one in pool.layers[0].of_slot(row, position + 1))
        torch.testing.assert_close(keys[:, :, -1], k[row].float())
        expected = at_once(q[row : row + 1].float(), SlotKeys(keys_KDT=keys, values_KTE=values), rule)
        rounding = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(out[row : row + 1].float(), expected, **rounding)


@IN_BLOCKS
@pytest.mark.parametrize("rule", [*FULL, AttentionRule(scale=0.3, window=600), AttentionRule(scale=0.3, window=300)])
def test_keys_that_rows_have_in_common_are_read_once(rule: AttentionRule, dtype: torch.dtype, width: int) -> None:
    """All have 192 in common, two of them 640, and row 3 nothing: no slot but the first of a prefix is read there. With
    a window each row reads its own. Break: do not hide what is in common from a row's own keys; begin the second
    prefix where the first one began; read it from the second of its rows."""
    pool = filled_pool(832, dtype, width)
    pool.copy([(0, 1), (0, 2)], [640, 192])
    if rule.window is None:
        for block, slot, at in ((0, 1, slice(256)), (1, 1, slice(256)), (2, 1, slice(128)), (0, 2, slice(192))):
            kv = pool.layers[0].blocks[block]
            kv.keys_SKDT[slot, :, :, at] = 1000.0
            kv.values_SKTE[slot, :, at] = 1000.0
    position_N, slot_N = torch.tensor([641, 820, 200, 767]), torch.arange(4)
    attention = SlotAttention(
        pool,
        slot_N=slot_N,
        position_N=position_N,
        num_decode=4,
        kv_length=832,
        segments=[],
        shared=[SharedPrefix(rows=(0, 1, 2), first=0, end=192), SharedPrefix(rows=(0, 1), first=192, end=640)],
    )
    q, k, v = (torch.randn(4, heads, width).to(dtype) for heads in (4, 2, 2))
    sinks_H = None if rule.sinks_H is None else rule.sinks_H.to(dtype)
    out = attention.attend(0, q, k, v, replace(rule, sinks_H=sinks_H))
    for row, position in enumerate(position_N.tolist()):
        keys, values = (one.float() for one in pool.layers[0].of_slot(row, position + 1))
        common = (0, 640, 192, 0)[row]
        if common:
            first_keys, first_values = (one.float() for one in pool.layers[0].of_slot(0, common))
            keys = torch.cat([first_keys, keys[:, :, common:]], dim=2)
            values = torch.cat([first_values, values[:, common:]], dim=1)
        expected = at_once(q[row : row + 1].float(), SlotKeys(keys_KDT=keys, values_KTE=values), rule)
        rounding = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(out[row : row + 1].float(), expected, **rounding)


def test_a_cache_is_in_blocks_in_half_precision_and_of_a_large_model() -> None:
    """Layers without keys count for nothing. Break: ask less of a position."""
    assert in_blocks([512], 4, on_cpu=True)
    assert not in_blocks([512, 508], 4, on_cpu=True)
    assert in_blocks([8], 2, on_cpu=True)
    assert not in_blocks([512], 4, on_cpu=False)
    assert not in_blocks([], 4, on_cpu=True)


def test_products_of_half_precision_read_whole_blocks() -> None:
    """A part of a block would be copied for each. Break: return the length itself."""
    assert [filled_pool(832, width=128).readable(length) for length in (64, 128, 300, 700)] == [64, 128, 300, 700]
    pool = filled_pool(832, torch.bfloat16)
    assert [pool.readable(length) for length in (64, 128, 300, 700, 832)] == [64, 256, 300, 768, 832]


def test_a_prompt_lies_in_several_blocks_and_is_copied_with_them() -> None:
    """Break: in `KVPool.copy` count a block's positions from the sequence's first."""
    pool = filled_pool(832, width=128)
    position_N = torch.arange(200, 700)
    segment = SlotSegment(slot=1, first_row=0, start=200, end=700)
    attention = SlotAttention(
        pool, slot_N=torch.ones(500).long(), position_N=position_N, num_decode=0, kv_length=0, segments=[segment]
    )
    q, k, v = (torch.randn(500, heads, 128) for heads in (4, 2, 2))
    out = attention.attend(0, q, k, v, AttentionRule(scale=0.3))
    keys, values = pool.layers[0].of_slot(1, 700)
    torch.testing.assert_close(keys[:, :, 200:], k.permute(1, 2, 0))
    expected = at_once(q, SlotKeys(keys_KDT=keys, values_KTE=values), AttentionRule(scale=0.3))
    torch.testing.assert_close(out, expected)
    pool.copy([(1, 2), (3, 0)], [700, 30])
    assert all(torch.equal(*pair) for pair in zip(pool.layers[0].of_slot(2, 700), (keys, values), strict=True))
    first, other = pool.layers[0].of_slot(0, 832), pool.layers[0].of_slot(3, 832)
    assert torch.equal(first[0][:, :, :64], other[0][:, :, :64])
    assert not torch.equal(first[0][:, :, 256:], other[0][:, :, 256:])


def test_a_segment_follows_the_decoding_rows() -> None:
    """Break: give a segment the wrong rows of the step."""
    pool = filled_pool(128)
    position_N, slot_N = torch.tensor([7, *range(20, 60)]), torch.tensor([0, *[2] * 40])
    segment = SlotSegment(slot=2, first_row=1, start=20, end=60)
    attention = SlotAttention(
        pool, slot_N=slot_N, position_N=position_N, num_decode=1, kv_length=64, segments=[segment]
    )
    q, k, v = torch.randn(41, 4, 8), torch.randn(41, 2, 8), torch.randn(41, 2, 8)
    out, kv = attention.attend(0, q, k, v, AttentionRule(scale=0.3)), pool.layers[0]
    keys, values = kv.of_slot(2, 60)
    seen = SlotKeys(keys_KDT=keys, values_KTE=values)
    torch.testing.assert_close(out[1:], at_once(q[1:], seen, AttentionRule(scale=0.3)))
