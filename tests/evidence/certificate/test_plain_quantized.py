"""The plain loop's own 4 and 8 bits, against those of bitsandbytes."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map, dequantize_4bit, quantize_4bit
from torch import nn

from sharpen.evidence.certificate.plain.quantized import FourBits, dynamic_values
from sharpen.models.nf4 import NF4Linear


def test_the_values_of_8_bits_are_those_of_bitsandbytes():
    for signed in (True, False):
        assert torch.equal(dynamic_values(signed=signed), create_dynamic_map(signed=signed))


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 64), (500, 128), (1000, 64), (9000, 128)])
def test_a_weight_in_4_bits_is_that_of_bitsandbytes_bit_for_bit(shape, before):
    """But for blocks whose scale is as near to one of the 256 values as to the next, within a step of the kernel's
    table: they have one or the other. The last shape takes several pieces."""
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[0], 1)
    weight[1] = 0.0
    packed = quantize_4bit(weight.to(before), quant_type="nf4", compress_statistics=True)
    found = dequantize_4bit(*packed).float().reshape(-1, 64)
    one, other = (
        FourBits(before=before, other=other).kept(weight).values().to(before).float().reshape(-1, 64)
        for other in (False, True)
    )
    as_one, as_other = ((found == mine).all(1) for mine in (one, other))
    assert bool((as_one | as_other).all())
    assert as_one.float().mean().item() > 0.99


@pytest.mark.parametrize("width", [31, 96])
def test_rows_that_are_no_whole_blocks_are_filled_as_in_a_layer(width):
    torch.manual_seed(0)
    layer = nn.Linear(width, 5)
    assert torch.equal(
        NF4Linear(layer).whole(), FourBits(before=torch.float32, other=False).kept(layer.weight).values()
    )
