"""The linear layers of the fast forward pass: those with the same input as one product, with adapters beside.

In: linear layers, or peft's around them. Out: `Projection`s. The layers' parameters become views of the fused weights,
so there is no second copy that a weight update could leave stale.

Shape suffixes: N rows, C inputs, O outputs of all layers, A ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sharpen.engine.embedded.beside import Beside
from sharpen.models.adapters import LowRank, parts_of


def stack(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack parameters; they become views of the result."""
    stacked = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        stop = start + parameter.shape[0]
        parameter.data = stacked[start:stop]
        start = stop
    return stacked


def own(parameters: Iterable[torch.Tensor]) -> None:
    """Copy parameters that are not stacked. What was loaded may be a mapped file, which stays in memory as a whole
    while a tensor is a part of it."""
    for parameter in {id(one): one for one in parameters}.values():
        parameter.data = parameter.data.clone()


class Projection:
    """Linear layers with the same input."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """Fuse the layers, which are `nn.Linear`s, some of them perhaps with an adapter."""
        parts = [parts_of(layer) for layer in layers]
        linears, adapters = [linear for linear, _ in parts], [adapter for _, adapter in parts]
        self.layers: Sequence[nn.Linear] = linears
        self.beside: Beside | None = None
        """The adapters by name, if the engine serves some."""
        self.weight_OC = linears[0].weight if len(linears) == 1 else stack([linear.weight for linear in linears])
        self._bias_O = None if linears[0].bias is None else stack([linear.bias for linear in linears])
        self._adapter = _fused_adapters(adapters, [linear.out_features for linear in linears])

    def rows(self, x_NC: torch.Tensor) -> torch.Tensor:
        """Return the layers' outputs side by side, shape NO."""
        out_NO = F.linear(x_NC, self.weight_OC, self._bias_O)
        if self._adapter is not None:
            small_NA = F.linear(x_NC, self._adapter.down_AC).mul_(self._adapter.scale)
            out_NO.addmm_(small_NA, self._adapter.up_OA.t())
        if self.beside is not None:
            self.beside.add(x_NC, out_NO)
        return out_NO

    def columns(self, x_CN: torch.Tensor) -> torch.Tensor:
        """Return the same, with a column for each row, shape ON."""
        out_ON = torch.mm(self.weight_OC, x_CN)
        if self._bias_O is not None:
            out_ON += self._bias_O.unsqueeze(1)
        if self._adapter is not None:
            small_AN = torch.mm(self._adapter.down_AC, x_CN).mul_(self._adapter.scale)
            out_ON.addmm_(self._adapter.up_OA, small_AN)
        if self.beside is not None:
            self.beside.add_columns(x_CN, out_ON)
        return out_ON


def _fused_adapters(adapters: Sequence[LowRank | None], sizes: Sequence[int]) -> LowRank | None:
    """Fuse the adapters of layers with these numbers of outputs: each writes to its own layer's outputs, from its own
    ranks."""
    present = [adapter for adapter in adapters if adapter is not None]
    if not present:
        return None
    down_AC, ranks = stack([adapter.down_AC for adapter in present]), 0
    up_OA, outputs = down_AC.new_zeros(sum(sizes), len(down_AC)), 0
    for adapter, size in zip(adapters, sizes, strict=True):
        if adapter is not None:
            rank = adapter.up_OA.shape[1]
            block = up_OA[outputs : outputs + size, ranks : ranks + rank]
            block.copy_(adapter.up_OA)
            adapter.up_OA.data = block
            ranks += rank
        outputs += size
    return LowRank(down_AC=down_AC, up_OA=up_OA, scale=present[0].scale)
