"""The KV cache: the keys and values of all slots for each layer, grown on demand within a budget.

In: slot numbers and lengths. Out: per-layer `LayerKV`s. The last slot is scratch, which the padding rows of a step
write to. CPU memory is zeroed, and committed by the system when first touched, so unused slots cost nothing. It must
not be uninitialised, since a NaN at a masked position would still poison a sum.

Shape suffixes: S slots + 1, N rows of a step, K key-value heads, T positions, D key size, E value size.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

LENGTH_BUCKET = 64
"""KV lengths are multiples of this, so that kernels see few shapes."""

_FIRST_SLOTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """The cache of one layer. Keys are stored transposed, so that products can use slices of both without a copy."""

    keys_SKDT: torch.Tensor
    values_SKTE: torch.Tensor

    @property
    def num_heads(self) -> int:
        """The number of key-value heads."""
        return self.keys_SKDT.shape[1]

    @property
    def num_elements(self) -> int:
        """The number of elements per position."""
        return self.num_heads * (self.keys_SKDT.shape[2] + self.values_SKTE.shape[3])

    def write(self, slot_N: torch.Tensor, position_N: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> None:
        """Write each row's key and value at its slot and position."""
        self.keys_SKDT[slot_N, :, :, position_N] = k_NKD
        self.values_SKTE[slot_N, :, position_N] = v_NKD


def bucketed(length: int) -> int:
    """Round a length up to a multiple of `LENGTH_BUCKET`."""
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


def default_budget_bytes(device: torch.device) -> int:
    """Return a quarter of the memory that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The shape of a layer's cache: heads, and the sizes of a key and of a value."""

    num_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The layers that have keys and values by number, and for those that read an earlier layer's, that layer."""

    shapes: Mapping[int, KVShape]
    owners: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def uniform(cls, num_layers: int, num_heads: int, size: int) -> KVLayout:
        """Return that of layers which are all alike."""
        return cls(
            shapes=dict.fromkeys(range(num_layers), KVShape(num_heads=num_heads, key_size=size, value_size=size))
        )

    @property
    def elements_per_position(self) -> int:
        """The number of elements of a position in all layers."""
        return sum(shape.num_heads * (shape.key_size + shape.value_size) for shape in self.shapes.values())


class KVPool:
    """The keys and values of all slots 0 .. num_slots - 1, and of the extra slot `scratch`."""

    def __init__(
        self,
        *,
        layout: KVLayout,
        dtype: torch.dtype,
        device: torch.device,
        max_slots: int,
        max_length: int,
        budget_bytes: int,
        state_bytes: int = 0,
    ) -> None:
        """`state_bytes` is what a slot takes besides its KV, within the same budget."""
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._max_slots = max_slots
        self._budget_bytes = budget_bytes
        self._state_bytes = state_bytes
        self.max_length = bucketed(max_length)
        self.num_slots = 0
        self.length = 0
        self.allocation = 0
        """How often the memory was allocated."""
        self.layers: dict[int, LayerKV] = {}
        length = min(self.max_length, 4 * LENGTH_BUCKET)
        self.resize(min(_FIRST_SLOTS, self.slots_at(length)), length, used=0)

    @property
    def scratch(self) -> int:
        """The slot that padding rows write to."""
        return self.num_slots

    def slots_at(self, length: int) -> int:
        """Return how many slots of `length` positions fit the budget (at least one, at most `max_slots`)."""
        per_position = self._layout.elements_per_position * self._dtype.itemsize
        per_slot = max(1, per_position * length + self._state_bytes)
        return max(1, min(self._max_slots, self._budget_bytes // per_slot))

    def longer(self, needed: int) -> int:
        """Return the length to grow to: at least `needed` and half as much again, but at most `max_length`."""
        return min(self.max_length, bucketed(max(needed, self.length + self.length // 2)))

    def resize(self, num_slots: int, length: int, *, used: int) -> None:
        """Reallocate layer by layer, keeping those of the first `used` slots that fit. `length` may not shrink. What is
        not copied takes no memory on a CPU until it is written."""
        assert length % LENGTH_BUCKET == 0
        assert length >= self.length
        self._allocate(num_slots, length, kept=min(num_slots, self.num_slots, used))

    def release(self) -> None:
        """Forget what all slots hold. On a CPU their memory goes back to the system until it is used again; a GPU's
        allocator would keep it."""
        if self._device.type == "cpu":
            self._allocate(self.num_slots, self.length, kept=0)

    def _allocate(self, num_slots: int, length: int, *, kept: int) -> None:
        for layer, shape in self._layout.shapes.items():
            keys = _zeros((num_slots + 1, shape.num_heads, shape.key_size, length), self._dtype, self._device)
            values = _zeros((num_slots + 1, shape.num_heads, length, shape.value_size), self._dtype, self._device)
            if kept:
                old = self.layers[layer]
                keys[:kept, :, :, : self.length] = old.keys_SKDT[:kept]
                values[:kept, :, : self.length] = old.values_SKTE[:kept]
            self.layers[layer] = LayerKV(keys_SKDT=keys, values_SKTE=values)
        self.num_slots, self.length = num_slots, length
        self.allocation += 1

    def write(
        self, layer: int, slot_N: torch.Tensor, position_N: torch.Tensor, k_NKD: torch.Tensor, v_NKE: torch.Tensor
    ) -> LayerKV:
        """Write each row's key and value at its slot and position, and return the layer's cache. Those of a layer that
        reads another's were written there."""
        owner = self._layout.owners.get(layer)
        if owner is not None:
            return self.layers[owner]
        kv = self.layers[layer]
        kv.write(slot_N, position_N, k_NKD, v_NKE)
        return kv

    @torch.inference_mode()
    def copy(self, moves: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Copy the first so many positions of each (source, target) pair of slots. All are read before any is written,
        those of about the same length together."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for move, length in zip(moves, lengths, strict=True):
            if length:
                about = LENGTH_BUCKET << (-(-length // LENGTH_BUCKET) - 1).bit_length()
                groups.setdefault(min(about, self.length), []).append(move)
        indices = [(torch.tensor(group, device=self._device).T, length) for length, group in groups.items()]
        for layer in self.layers.values():
            keys_SKDT, values_SKTE = layer.keys_SKDT, layer.values_SKTE
            read = [(keys_SKDT[pair[0], :, :, :end], values_SKTE[pair[0], :, :end]) for pair, end in indices]
            for (pair, end), (keys, values) in zip(indices, read, strict=True):
                keys_SKDT[pair[1], :, :, :end] = keys
                values_SKTE[pair[1], :, :end] = values

    @torch.inference_mode()
    def zero(self, slot: int) -> None:
        """Zero a slot and the scratch slot, since a NaN may have been written to them."""
        for layer in self.layers.values():
            for cleared in (slot, self.scratch):
                layer.keys_SKDT[cleared].zero_()
                layer.values_SKTE[cleared].zero_()

    @torch.inference_mode()
    def zero_all(self) -> None:
        """Zero every slot."""
        for layer in self.layers.values():
            layer.keys_SKDT.zero_()
            layer.values_SKTE.zero_()

    @property
    def num_bytes(self) -> int:
        """The reserved memory in bytes; on the CPU only touched pages are committed."""
        return sum(layer.keys_SKDT.nbytes + layer.values_SKTE.nbytes for layer in self.layers.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Not from the C library, which keeps blocks of less than 32 MB that are freed.
    pages = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), **_PRIVATE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
