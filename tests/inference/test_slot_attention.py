"""The way that prompts are computed on a GPU, on a CPU: the same numbers as the CPU's own."""

from __future__ import annotations

import pytest
import torch

from sharpen.inference.embedded.attention import AttentionRule, SlotAttention, SlotSegment
from sharpen.inference.embedded.kv import KVPool


@pytest.mark.parametrize("start", [0, 30])
@pytest.mark.parametrize("window", [None, 25, 200])
def test_prompts_on_a_gpu_are_computed_as_on_a_cpu(start: int, window: int | None) -> None:
    """A prompt from its start and one behind a cached prefix. Break: take `is_causal` whatever the start is."""
    torch.manual_seed(0)
    pool = KVPool(
        num_layers=1,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_slots=2,
        max_length=128,
        budget_bytes=1 << 20,
    )
    kv = pool.layers[0]
    kv.keys_SKDT.normal_()
    kv.values_SKTD.normal_()
    segment = SlotSegment(slot=1, first_row=0, start=start, end=start + 60)
    position_N = torch.arange(start, start + 60)
    attention = SlotAttention(
        pool,
        slot_N=torch.ones_like(position_N),
        position_N=position_N,
        num_decode=0,
        kv_length=0,
        segments=[segment],
    )
    q_NHD, rule = torch.randn(60, 4, 8), AttentionRule(scale=0.3, window=window)
    own = attention._segment(kv, q_NHD, 0, segment, rule)
    keys, values = kv.keys_SKDT[1, :, :, : segment.end], kv.values_SKTD[1, :, : segment.end]
    torch.testing.assert_close(attention._segment_on_gpu(q_NHD, keys, values, 1, segment, rule), own)
