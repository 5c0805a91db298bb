"""Adapters by name beside the model's own weights: rows of different adapters, or of none, in one step.

In: adapters that fit the model; for each step, the adapter of every row. Out: what they add to the linear layers'
outputs. The adapters of a layer are one product of low rank, whose inner columns are masked: a row keeps those of its
own adapter, scaled. Of several adapters only the columns from the first to the last that the step has are computed, so
that one alone costs what it would by itself, and a step without any nothing.

Shape suffixes: N rows, C inputs, O outputs, A inner columns: the ranks of all adapters of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from sharpen.engine.embedded.batch import on_device
from sharpen.engine.requests import no_adapter
from sharpen.errors import ModelError
from sharpen.models.adapter_files import NamedAdapter
from sharpen.models.adapters import PREFIX, LowRank, check_adapters

BASE = 0
"""The number of rows without an adapter; adapters count from 1."""
Span = tuple[int, int]
"""The adapters that are computed: from the first to before the second. Empty, (0, 0), without any."""


class Fused(Protocol):
    """Linear layers that are computed as one."""

    layers: Sequence[nn.Linear]
    beside: Beside | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Columns:
    """Whose the inner columns of a layer are. Equal ones are one object."""

    adapter_A: torch.Tensor
    scale_A: torch.Tensor
    first: Mapping[int, int]
    """The first column of each adapter, and of the number after the last one."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rows:
    """The adapter of every row that is computed, and the masks for the columns that have occurred."""

    adapter_N: torch.Tensor
    span: Span
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def part(self, columns: _Columns) -> tuple[slice, torch.Tensor] | None:
        """Return which columns are computed, and their mask (NA); None if none are."""
        first, last = self.span
        where = slice(columns.first[first], columns.first[last])
        if where.start == where.stop:
            return None
        mask_NA = self.masks.get(id(columns))
        if mask_NA is None:
            owner_A, scale_A = columns.adapter_A[where], columns.scale_A[where]
            mask_NA = torch.where(self.adapter_N.unsqueeze(1) == owner_A, scale_A, torch.zeros_like(scale_A))
            self.masks[id(columns)] = mask_NA
        return where, mask_NA


class Beside:
    """What the adapters add to linear layers that are computed as one."""

    def __init__(self, company: Adapters, columns: _Columns, down_AC: torch.Tensor, up_AO: torch.Tensor) -> None:
        self._company, self._columns = company, columns
        self._down_AC, self._up_AO = down_AC, up_AO

    def add(self, x_NC: torch.Tensor, out_NO: torch.Tensor) -> None:
        """Add to the outputs, with a row for each row."""
        if (part := self._part(len(x_NC))) is not None:
            where, mask_NA = part
            out_NO.addmm_(F.linear(x_NC, self._down_AC[where]).mul_(mask_NA), self._up_AO[where])

    def add_columns(self, x_CN: torch.Tensor, out_ON: torch.Tensor) -> None:
        """Add to the outputs, with a column for each row."""
        if (part := self._part(x_CN.shape[1])) is not None:
            where, mask_NA = part
            out_ON.addmm_(self._up_AO[where].t(), torch.mm(self._down_AC[where], x_CN).mul_(mask_NA.t()))

    def hook(self, layer: nn.Linear, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Add to the output of a layer in a model's own forward pass."""
        if self._company.rows is not None:
            self.add(inputs[0].reshape(-1, layer.in_features), out.view(-1, layer.out_features))

    def _part(self, num_rows: int) -> tuple[slice, torch.Tensor] | None:
        rows = self._company.rows
        if rows is None:
            return None
        assert num_rows == len(rows.adapter_N), "a layer computes other rows than the step's"
        return rows.part(self._columns)


class Adapters:
    """The adapters of an engine by name, in the storage that steps read."""

    def __init__(self, adapters: Sequence[NamedAdapter], model: Any, fused: Iterable[Fused], *, whole: bool) -> None:
        """Put the adapters, which fit the `model`, beside its layers: those that are `fused`, else each by itself.
        `whole`: every step computes all adapters, so that a row never depends on the others'."""
        self.rows: Rows | None = None
        self.num_bytes = 0
        """The memory of all adapters."""
        self.numbers = {adapter.name: number for number, adapter in enumerate(adapters, 1)}
        self._adapters, self._whole = adapters, whole
        self._columns: dict[Any, _Columns] = {}
        self._stored: dict[tuple[int, str], LowRank] = {}
        names = {layer: name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        taken: set[nn.Linear] = set()
        for projection in fused:
            projection.beside = self._beside([(names[layer], layer) for layer in projection.layers])
            taken.update(projection.layers)
        for layer, name in names.items():
            if layer not in taken and (beside := self._beside([(name, layer)])) is not None:
                layer.register_forward_hook(beside.hook)

    def number(self, name: str) -> int:
        """Return the number of the adapter that a request names. Raises `SamplingError` if there is none."""
        if not name:
            return BASE
        if name not in self.numbers:
            raise no_adapter(name, self.numbers)
        return self.numbers[name]

    def lay_out(self, adapter_N: npt.NDArray[np.int64], device: torch.device) -> None:
        """Say which adapter each row of the next forward pass has."""
        span = self.span(adapter_N)
        self.rows = Rows(adapter_N=on_device(adapter_N, device), span=span) if any(span) else None

    def span(self, adapter_N: npt.NDArray[np.int64]) -> Span:
        """Return the adapters that rows make a step compute."""
        present_N = adapter_N[adapter_N != BASE]
        if not len(present_N):
            return (0, 0)
        return (1, len(self._adapters) + 1) if self._whole else (int(present_N.min()), int(present_N.max()) + 1)

    def some(self, row_M: torch.Tensor) -> Rows | None:
        """Return some of the rows that were laid out, for a layer that computes these alone."""
        rows = self.rows
        return None if rows is None else Rows(adapter_N=rows.adapter_N[row_M], span=rows.span)

    def fixed(self, adapter_N: torch.Tensor, span: Span) -> Rows | None:
        """Return rows whose adapters are in a tensor that may change later, within a span."""
        return Rows(adapter_N=adapter_N, span=span) if any(span) else None

    @contextmanager
    def computing(self, rows: Rows | None) -> Iterator[None]:
        """Let layers compute these rows for the time of a block."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before

    def load(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy new weights, by the names of peft's files, into an adapter. Raises `ModelError`, with nothing changed,
        for a name that there is not, or unless names and shapes are exactly the adapter's."""
        mine = self.tensors(name)
        check_adapters({key: tuple(stored.shape) for key, stored in mine.items()}, tensors)
        with torch.no_grad():
            for key, stored in mine.items():
                stored.copy_(tensors[key])

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the stored weights of an adapter by the names of peft's files. Raises `ModelError` for a name that
        there is not."""
        if name not in self.numbers:
            raise ModelError(f"there is no adapter {name!r}; there are {', '.join(self.numbers) or 'none'}")
        number, mine = self.numbers[name], dict[str, torch.Tensor]()
        for (owner, layer), part in self._stored.items():
            if owner == number:
                mine |= {f"{PREFIX}{layer}.lora_A.weight": part.down_AC, f"{PREFIX}{layer}.lora_B.weight": part.up_OA}
        return mine

    @torch.no_grad()
    def _beside(self, layers: Sequence[tuple[str, nn.Linear]]) -> Beside | None:
        """Store the adapters' parts for layers that are computed as one; None if they have none."""
        found = [
            (number, place, adapter.layers[name])
            for number, adapter in enumerate(self._adapters, 1)
            for place, (name, _) in enumerate(layers)
            if name in adapter.layers
        ]
        if not found:
            return None
        ends = np.cumsum([layer.out_features for _, layer in layers])
        weight = layers[0][1].weight
        ranks = [len(part.down_AC) for _, _, part in found]
        down_AC = weight.new_empty(sum(ranks), layers[0][1].in_features)
        up_AO, column = weight.new_zeros(sum(ranks), int(ends[-1])), 0
        for (number, place, part), rank in zip(found, ranks, strict=True):
            name, layer = layers[place]
            outputs = slice(int(ends[place]) - layer.out_features, int(ends[place]))
            stored = LowRank(
                down_AC=down_AC[column : column + rank], up_OA=up_AO[column : column + rank, outputs].t(), scale=1.0
            )
            stored.down_AC.copy_(part.down_AC)
            stored.up_OA.copy_(part.up_OA)
            self._stored[number, name] = stored
            column += rank
        self.num_bytes += down_AC.nbytes + up_AO.nbytes
        owners = tuple((number, rank, part.scale) for (number, _, part), rank in zip(found, ranks, strict=True))
        return Beside(self, self._columns_of(owners, weight), down_AC, up_AO)

    def _columns_of(self, owners: tuple[tuple[int, int, float], ...], like: torch.Tensor) -> _Columns:
        """Return the columns of adapters, each with its number, rank and scale."""
        if owners not in self._columns:
            number_A = np.concatenate([np.full(rank, number) for number, rank, _ in owners])
            scale_A = np.concatenate([np.full(rank, scale) for _, rank, scale in owners])
            firsts = np.searchsorted(number_A, np.arange(len(self._adapters) + 2))
            self._columns[owners] = _Columns(
                adapter_A=torch.from_numpy(number_A).to(like.device),
                scale_A=torch.from_numpy(scale_A).to(like),
                first=dict(enumerate(firsts.tolist())),
            )
        return self._columns[owners]
