"""The KV cache: the keys and values of all slots for each layer, grown on demand within a budget.

In: slot numbers and lengths. Out: per-layer `LayerKV`s. On a CPU the positions of a large model are in blocks of
`BLOCK_LENGTH`, each a tensor over all slots: a longer sequence adds a block and moves nothing, products read whole
blocks without a copy, and memory, which the system commits when it is first touched, follows each slot's own length.
Elsewhere there is one block, so that a step is few products: it grows by half, and is copied. The last slot is scratch,
which the padding rows of a step write to. Memory must not be uninitialised, since a NaN at a masked position would
still poison a sum.

Shape suffixes: S slots + 1, N rows of a step, M some of them, K key-value heads, T positions of a block, D key size, E
value size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sharpen.machine import available_bytes, own_pages

LENGTH_BUCKET = 64
"""KV lengths are multiples of this, so that kernels see few shapes."""

BLOCK_LENGTH = 4 * LENGTH_BUCKET
"""Positions of a block, where there are several."""

_LARGE_POSITION = 2048
"""Bytes of a position in a layer, on average, from which blocks cost less than they save."""

_WORTH_SHARING = 8 << 20
"""Bytes of a layer that it is worth not to read, since one more product takes time too: those of 300 positions for
eight rows of 0.6B's shape."""

_FIRST_SLOTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlock:
    """The keys and values of consecutive positions of all slots. Keys are seen transposed, as products want them. In
    memory they are too where there is one block; where there are several, in rows as the values."""

    keys_SKDT: torch.Tensor
    values_SKTE: torch.Tensor

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.values_SKTE.shape[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where some rows of a step are written: a block by its number, the rows (None: all), and their slots and positions
    within the block."""

    block: int
    row_M: torch.Tensor | None
    slot_M: torch.Tensor
    position_M: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """The cache of one layer, in blocks of equal length; the last may be shorter."""

    blocks: list[KVBlock]

    @property
    def block_length(self) -> int:
        """The positions of a block."""
        return self.blocks[0].length

    @property
    def num_heads(self) -> int:
        """The number of key-value heads."""
        return self.blocks[0].keys_SKDT.shape[1]

    @property
    def num_elements(self) -> int:
        """The number of elements per position."""
        return self.num_heads * (self.blocks[0].keys_SKDT.shape[2] + self.blocks[0].values_SKTE.shape[3])

    def write(self, places: Sequence[Place], k_NKD: torch.Tensor, v_NKE: torch.Tensor) -> None:
        """Write each row's key and value at its slot and position."""
        for place in places:
            block, row_M = self.blocks[place.block], place.row_M
            k_MKD, v_MKE = (k_NKD, v_NKE) if row_M is None else (k_NKD[row_M], v_NKE[row_M])
            block.keys_SKDT[place.slot_M, :, :, place.position_M] = k_MKD
            block.values_SKTE[place.slot_M, :, place.position_M] = v_MKE

    def parts(self, first: int, end: int) -> Iterator[tuple[KVBlock, slice]]:
        """Yield the blocks that hold positions first .. end - 1, each with those positions within it."""
        for number in range(first // self.block_length, -(-end // self.block_length)):
            start = number * self.block_length
            block = self.blocks[number]
            yield block, slice(max(0, first - start), min(block.length, end - start))

    def of_slot(self, slot: int, end: int, *, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys [K, D, T] and values [K, T, E] of positions first .. end - 1: a view of a single block, a
        copy of several, with keys in rows."""
        parts = self.parts(first, end)
        keys, values = zip(
            *((block.keys_SKDT[slot, :, :, at], block.values_SKTE[slot, :, at]) for block, at in parts), strict=True
        )
        if len(keys) == 1:
            return keys[0], values[0]
        return torch.cat([one.mT for one in keys], dim=1).mT, torch.cat(values, dim=1)

    def of_slots(self, slot_M: torch.Tensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of the keys [M, K, D, T] and values [M, K, T, E] of positions first .. end - 1 of some
        slots."""
        parts = list(self.parts(first, end))
        keys = [block.keys_SKDT[:, :, :, at].index_select(0, slot_M) for block, at in parts]
        values = [block.values_SKTE[:, :, at].index_select(0, slot_M) for block, at in parts]
        return (keys[0], values[0]) if len(parts) == 1 else (torch.cat(keys, dim=3), torch.cat(values, dim=2))


def bucketed(length: int) -> int:
    """Round a length up to a multiple of `LENGTH_BUCKET`."""
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


def default_budget_bytes(device: torch.device) -> int:
    """Return a quarter of the memory that can be had now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    return available_bytes() // 4


def in_blocks(values: Sequence[int], itemsize: int, *, on_cpu: bool) -> bool:
    """Whether a cache with so many values for a position of each layer, of so many bytes each, is in blocks: on a CPU
    in half precision, whose products would copy what is not whole, and of a large model."""
    return on_cpu and (itemsize == 2 or sum(values) * itemsize >= _LARGE_POSITION * max(1, len(values)))


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
    def values(self) -> list[int]:
        """The number of elements of a position in each layer."""
        return [shape.num_heads * (shape.key_size + shape.value_size) for shape in self.shapes.values()]

    @property
    def elements_per_position(self) -> int:
        """The number of elements of a position in all layers."""
        return sum(self.values)


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
        self._in_blocks = in_blocks(layout.values, dtype.itemsize, on_cpu=device.type == "cpu")
        self.max_length = bucketed(max_length)
        self.num_slots = 0
        self.length = 0
        self.allocation = 0
        """How often the memory was allocated."""
        self.layers: dict[int, LayerKV] = {}
        length = min(self.max_length, BLOCK_LENGTH)
        self.resize(min(_FIRST_SLOTS, self.slots_at(length)), length, kept=())

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
        """Return the length to grow to, at most `max_length`: whole blocks; of a single one half as much again, since
        all is copied."""
        if self._in_blocks:
            return min(self.max_length, -(-needed // BLOCK_LENGTH) * BLOCK_LENGTH)
        return min(self.max_length, bucketed(max(needed, self.length + self.length // 2)))

    def resize(self, num_slots: int, length: int, *, kept: Sequence[int]) -> None:
        """Make room for so many slots and positions. `kept`: the first so many positions of each slot keep what they
        hold, of those slots that fit. `length` may not shrink. What is not copied takes no memory on a CPU until it is
        written."""
        assert length % LENGTH_BUCKET == 0
        assert length >= self.length
        self._allocate(num_slots, length, kept=kept[:num_slots])

    def release(self) -> None:
        """Forget what all slots hold. On a CPU their memory goes back to the system until it is used again; a GPU's
        allocator would keep it."""
        if self._device.type == "cpu":
            num_slots, self.num_slots = self.num_slots, 0
            self._allocate(num_slots, self.length, kept=())

    def _allocate(self, num_slots: int, length: int, *, kept: Sequence[int]) -> None:
        stays = self.num_slots == num_slots and self._in_blocks
        for number, (start, size) in enumerate(self._extents(length)):
            if stays and start < self.length:
                continue
            ends = [min(bucketed(max(0, held - start)), size) for held in kept]  # what is copied takes memory
            for layer, block in self._new_block(num_slots, size):
                blocks = self.layers.setdefault(layer, LayerKV(blocks=[])).blocks
                for run, end in _runs(ends):
                    old = blocks[number]
                    block.keys_SKDT[run, :, :, :end] = old.keys_SKDT[run, :, :, :end]
                    block.values_SKTE[run, :, :end] = old.values_SKTE[run, :, :end]
                blocks[number : number + 1] = [block]
        self.num_slots, self.length = num_slots, length
        self.allocation += 1

    def _extents(self, length: int) -> list[tuple[int, int]]:
        """Return the first position and the length of each block of so many positions."""
        size = BLOCK_LENGTH if self._in_blocks else length
        return [(start, min(size, self.max_length - start)) for start in range(0, length, size)]

    def _new_block(self, num_slots: int, size: int) -> Iterator[tuple[int, KVBlock]]:
        """Yield the zeroed blocks of all layers, each made when it is asked for, so that what it replaces can go
        first."""
        for layer, shape in self._layout.shapes.items():
            key_shape = num_slots + 1, shape.num_heads, shape.key_size, size
            row_shape = num_slots + 1, shape.num_heads, size, shape.key_size
            value_shape = num_slots + 1, shape.num_heads, size, shape.value_size
            counts = math.prod(key_shape), math.prod(value_shape)
            if self._device.type == "cpu":  # one mapping for both, since a process may not have many
                memory = torch.frombuffer(own_pages(sum(counts) * self._dtype.itemsize), dtype=self._dtype)
            else:
                memory = torch.zeros(sum(counts), dtype=self._dtype, device=self._device)
            keys, values = memory[: counts[0]], memory[counts[0] :]
            keys_SKDT = keys.view(row_shape).mT if self._in_blocks else keys.view(key_shape)
            yield layer, KVBlock(keys_SKDT=keys_SKDT, values_SKTE=values.view(value_shape))

    @property
    def worth_sharing(self) -> int | None:
        """The positions of other slots from which on it is worth not to read them, since a step has the same keys
        elsewhere; None where the cache is not in blocks: small, or a GPU's."""
        if not self._in_blocks:
            return None
        return -(
            -_WORTH_SHARING * len(self._layout.shapes) // (self._layout.elements_per_position * self._dtype.itemsize)
        )

    def readable(self, length: int) -> int:
        """Return the positions to read for so many: all of a block in half precision, unless little of it is wanted,
        since products of a part would copy it."""
        rest = length % BLOCK_LENGTH
        if not self._in_blocks or self._dtype == torch.float32 or rest <= LENGTH_BUCKET:
            return length
        return min(self.length, length - rest + BLOCK_LENGTH)

    def places(self, slot_N: torch.Tensor, position_N: torch.Tensor) -> tuple[Place, ...]:
        """Return where the rows of a step are written, for `write` in each layer."""
        if not self._in_blocks or self.length <= BLOCK_LENGTH:
            return (Place(block=0, row_M=None, slot_M=slot_N, position_M=position_N),)
        block_N = position_N // BLOCK_LENGTH
        found = []
        for block in sorted(set(block_N.tolist())):
            row_M = (block_N == block).nonzero().squeeze(1)
            position_M = position_N[row_M] - block * BLOCK_LENGTH
            found.append(Place(block=block, row_M=row_M, slot_M=slot_N[row_M], position_M=position_M))
        return tuple(found)

    def write(self, layer: int, places: Sequence[Place], k_NKD: torch.Tensor, v_NKE: torch.Tensor) -> LayerKV:
        """Write each row's key and value at its slot and position, and return the layer's cache. Those of a layer that
        reads another's were written there."""
        owner = self._layout.owners.get(layer)
        if owner is not None:
            return self.layers[owner]
        kv = self.layers[layer]
        kv.write(places, k_NKD, v_NKE)
        return kv

    @torch.inference_mode()
    def copy(self, moves: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Copy the first so many positions of each (source, target) pair of slots. All are read before any is written,
        those of about the same length together."""
        for number, (start, size) in enumerate(self._extents(self.length)):
            groups: dict[int, list[tuple[int, int]]] = {}
            for move, length in zip(moves, lengths, strict=True):
                if length > start:
                    about = LENGTH_BUCKET << (-(-min(length - start, size) // LENGTH_BUCKET) - 1).bit_length()
                    groups.setdefault(min(about, size), []).append(move)
            indices = [(torch.tensor(group, device=self._device).T, end) for end, group in groups.items()]
            for layer in self.layers.values():
                keys_SKDT, values_SKTE = layer.blocks[number].keys_SKDT, layer.blocks[number].values_SKTE
                read = [(keys_SKDT[pair[0], :, :, :end], values_SKTE[pair[0], :, :end]) for pair, end in indices]
                for (pair, end), (keys, values) in zip(indices, read, strict=True):
                    keys_SKDT[pair[1], :, :, :end] = keys
                    values_SKTE[pair[1], :, :end] = values

    @torch.inference_mode()
    def zero(self, slot: int) -> None:
        """Zero a slot and the scratch slot, since a NaN may have been written to them."""
        for block in self._blocks():
            for cleared in (slot, self.scratch):
                block.keys_SKDT[cleared].zero_()
                block.values_SKTE[cleared].zero_()

    @torch.inference_mode()
    def zero_all(self) -> None:
        """Zero every slot."""
        for block in self._blocks():
            block.keys_SKDT.zero_()
            block.values_SKTE.zero_()

    def _blocks(self) -> Iterator[KVBlock]:
        return (block for layer in self.layers.values() for block in layer.blocks)

    @property
    def num_bytes(self) -> int:
        """The reserved memory in bytes; on the CPU only touched pages are committed."""
        return sum(block.keys_SKDT.nbytes + block.values_SKTE.nbytes for block in self._blocks())


def _runs(ends: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield the consecutive slots that hold equally many positions, and how many, but for those that hold none."""
    for end, run in itertools.groupby(range(len(ends)), key=ends.__getitem__):
        first, *others = run
        if end:
            yield slice(first, first + 1 + len(others)), end
