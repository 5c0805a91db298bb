"""A frozen linear layer whose weight is kept in 4 bits (NF4 with quantized scales; Dettmers et al. 2023, arXiv
2305.14314), by bitsandbytes.

In: a linear layer. Out: one that computes with the weight rounded to 4 bits, a little over half a byte for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BLOCK = 64
"""Values with a scale of their own. A row is whole blocks, with zeros at its end: where one spans two rows,
bitsandbytes' kernel for processors with AVX-512 reads the scales of others (seen in 0.50)."""

_ROUNDED_AT_ONCE = 2**18


class NF4Linear(nn.Linear):
    """A linear layer that is not trained; gradients flow through to its input. `weight` is packed, two values in each
    byte, each row in whole blocks: shape (values / 2, 1)."""

    def __init__(self, layer: nn.Linear) -> None:
        """Quantize a layer, which stays as it is. Its bias is shared."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.state: Any
        packed, self.state = _quantized(self._in_blocks(layer.weight.detach()))
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute in autocast's type, else in the input's."""
        from bitsandbytes.autograd._functions import matmul_4bit

        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        blocks = self._in_blocks(x.to(dtype))
        product: torch.Tensor = matmul_4bit(blocks, self.weight, quant_state=self.state, bias=bias)
        return product

    def whole(self) -> torch.Tensor:
        """Return the weight that it computes with, shape (outputs, inputs), in the type of the layer it was made of."""
        from bitsandbytes.functional import dequantize_4bit

        weight: torch.Tensor = dequantize_4bit(self.weight, self.state)
        return weight[:, : self.in_features]

    def _in_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        missing = -self.in_features % _BLOCK
        return nn.functional.pad(rows, (0, missing)) if missing else rows

    @property
    def num_bytes(self) -> int:
        """What weight and scales take."""
        parts: list[Any] = [self.weight, self.state.absmax, self.state.state2.absmax]
        return sum(part.nbytes for part in parts)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the scales with the weight."""
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.state.to(self.weight.device)
        return moved


def _quantized(weight_OC: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return what bitsandbytes' `quantize_4bit` returns with compressed statistics, to the last bit, but of some rows
    at a time: on a CPU it holds fourteen bytes for each value that it rounds, in blocks that the process then keeps."""
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    rows = max(1, _ROUNDED_AT_ONCE // weight_OC.shape[1])
    parts = [quantize_4bit(some, blocksize=_BLOCK, quant_type="nf4") for some in torch.split(weight_OC, rows)]
    scales = torch.cat([state.absmax for _, state in parts])
    offset = scales.mean()
    absmax, state2 = quantize_blockwise(scales - offset, blocksize=256)
    kind: Any = QuantState
    state = kind(
        absmax=absmax, shape=weight_OC.shape, dtype=weight_OC.dtype, blocksize=_BLOCK, code=parts[0][1].code,
        quant_type="nf4", offset=offset, state2=state2,
    )  # fmt: skip
    return torch.cat([packed for packed, _ in parts]), state
