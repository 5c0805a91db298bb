"""The states of recurrent and convolution layers: one for every slot, beside its KV; and snapshots of them.

In: slot numbers. Out: states by layer. A slot's state is the one after the positions that have KV. Unlike KV it cannot
be cut shorter, so copies are kept where other jobs are likely to begin (`Snapshots`). Zeros are the state before the
first token.

Shape suffixes: S slots, B sequences of one call, T tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sharpen.engine.embedded.slots import Indices
from sharpen.models.recurrent import Kind, States
from sharpen.types import IntArray

SNAPSHOT_SHARE = 4
"""Snapshots take at most one part in so many of the memory for KV and states."""

SlotState = tuple[States, ...]
"""The state of one sequence, layer by layer; every tensor has one row."""


class StatePool:
    """The states of all slots 0 .. num_slots - 1: for each layer, tensors with one row per slot."""

    def __init__(self, example: SlotState) -> None:
        """Hold no slot yet. `example` is any state of the model, for its shapes. Recurrent states are kept in fp32."""
        self._layers: list[dict[tuple[Kind, int], torch.Tensor]] = [
            {
                key: torch.zeros_like(state[:0], dtype=torch.float32 if key[0] == "recurrent" else state.dtype)
                for key, state in states.items()
            }
            for states in example
        ]
        self.bytes_per_slot = sum(tensor_S.shape[1:].numel() * tensor_S.itemsize for tensor_S in self._tensors())
        self.num_slots = 0

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor_S for layer in self._layers for tensor_S in layer.values()]

    @property
    def num_bytes(self) -> int:
        """The reserved memory in bytes."""
        return self.num_slots * self.bytes_per_slot

    def resize(self, num_slots: int) -> None:
        """Reallocate layer by layer, keeping the slots that fit; new ones are zero."""
        kept = min(num_slots, self.num_slots)
        for layer in self._layers:
            for key, old_S in layer.items():
                layer[key] = old_S.new_zeros(num_slots, *old_S.shape[1:])
                layer[key][:kept] = old_S[:kept]
        self.num_slots = num_slots

    def read(self, layer: int, slots_B: torch.Tensor) -> States:
        """Return copies of the states of some slots in one layer."""
        return {key: tensor_S.index_select(0, slots_B) for key, tensor_S in self._layers[layer].items()}

    def first(self, layer: int, count: int) -> States:
        """Return the states of the first `count` slots in one layer, not copied."""
        return {key: tensor_S[:count] for key, tensor_S in self._layers[layer].items()}

    def write(self, layer: int, slots_B: torch.Tensor, states: States) -> None:
        """Set the states of some slots in one layer."""
        for key, tensor_S in self._layers[layer].items():
            tensor_S.index_copy_(0, slots_B, states[key].to(tensor_S.dtype))

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the state of each source slot to its target. All are read before any is written."""
        for tensor_S in self._tensors():
            tensor_S[list(targets)] = tensor_S[list(sources)]

    @torch.inference_mode()
    def take(self, slot: int) -> SlotState:
        """Return a copy of a slot's state."""
        return tuple(
            {key: tensor_S[slot : slot + 1].clone() for key, tensor_S in layer.items()} for layer in self._layers
        )

    @torch.inference_mode()
    def put(self, slot: int, state: SlotState) -> None:
        """Set a slot's state."""
        for layer, states in zip(self._layers, state, strict=True):
            for key, tensor_S in layer.items():
                tensor_S[slot : slot + 1] = states[key]

    @torch.inference_mode()
    def zero(self, slot: int) -> None:
        """Set a slot's state to the one before the first token."""
        for tensor_S in self._tensors():
            tensor_S[slot].zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state after some ids."""

    ids_T: IntArray
    adapter: int
    state: SlotState


class Snapshots:
    """States after known ids, found by the ids themselves and the adapter that computed them. The least recently used
    is dropped first."""

    def __init__(self, capacity: int) -> None:
        """Keep at most `capacity` snapshots."""
        self.capacity = capacity
        self._by_ids: OrderedDict[tuple[int, bytes], Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_ids)

    def has(self, ids_T: IntArray, adapter: int) -> bool:
        """Whether there is a state after `ids_T`."""
        return (adapter, ids_T.tobytes()) in self._by_ids

    def keep(self, ids_T: IntArray, adapter: int, state: SlotState) -> None:
        """Keep the state after `ids_T`."""
        if not self.capacity:
            return
        if len(self._by_ids) >= self.capacity:
            self._by_ids.popitem(last=False)
        self._by_ids[adapter, ids_T.tobytes()] = Snapshot(ids_T=ids_T.copy(), adapter=adapter, state=state)

    def lengths(self, ids_T: IntArray, adapter: int, longest: int) -> Indices:
        """Return the lengths, ascending, of the prefixes of `ids_T` that have a snapshot, up to `longest`."""
        found = [
            len(snapshot.ids_T)
            for snapshot in self._by_ids.values()
            if snapshot.adapter == adapter
            and len(snapshot.ids_T) <= longest
            and np.array_equal(snapshot.ids_T, ids_T[: len(snapshot.ids_T)])
        ]
        return np.array(sorted(found), np.int64)

    def use(self, ids_T: IntArray, adapter: int) -> SlotState:
        """Return the state after `ids_T`, which must have a snapshot."""
        key = (adapter, ids_T.tobytes())
        self._by_ids.move_to_end(key)
        return self._by_ids[key].state

    def drop(self, adapter: int) -> None:
        """Drop those of one adapter."""
        for key in [key for key in self._by_ids if key[0] == adapter]:
            del self._by_ids[key]

    def clear(self) -> None:
        """Drop all."""
        self._by_ids.clear()


class SlotStates:
    """The states of the slots and their snapshots, as the scheduler moves jobs between slots."""

    def __init__(self, pool: StatePool, snapshots: Snapshots) -> None:
        self.pool = pool
        self.snapshots = snapshots
        self.snapshot_bytes = snapshots.capacity * pool.bytes_per_slot
        """The most that snapshots take."""
        self._starts: list[tuple[int, int | SlotState | None]] = []  # (slot, what its state is set to), not yet done

    @classmethod
    def within(cls, budget_bytes: int, example: SlotState) -> SlotStates:
        """Return the states of a model that has `budget_bytes` for KV and states; `example` is a state of it."""
        pool = StatePool(example)
        return cls(pool, Snapshots(budget_bytes // SNAPSHOT_SHARE // pool.bytes_per_slot))

    @property
    def num_bytes(self) -> int:
        """The memory of slots and snapshots in bytes."""
        return self.pool.num_bytes + len(self.snapshots) * self.pool.bytes_per_slot

    def usable(self, ids_T: IntArray, adapter: int, cached_S: Indices, kv_len_S: Indices) -> Indices:
        """Return how many of the `cached_S` ids whose KV a slot shares with `ids_T` have a state as well: the slot's
        own, or a snapshot. Shape S."""
        own_S = np.where(cached_S == kv_len_S, kv_len_S, 0)
        lengths = np.append(0, self.snapshots.lengths(ids_T, adapter, int(cached_S.max(initial=0))))
        found_S: Indices = lengths[np.searchsorted(lengths, cached_S, side="right") - 1]
        return np.maximum(own_S, found_S)

    def start(self, slot: int, source: int, ids_T: IntArray, adapter: int, source_length: int) -> None:
        """Let `slot` begin after `ids_T`, with the state of `source` if that is after so many ids, else a snapshot's.
        It is set by `settle`."""
        if not len(ids_T):
            self._starts.append((slot, None))
        elif len(ids_T) != source_length:
            self._starts.append((slot, self.snapshots.use(ids_T, adapter)))
        elif slot != source:
            self._starts.append((slot, source))

    def settle(self) -> None:
        """Set the states of slots that were started. Sources are read before any slot is written."""
        copies = [(source, slot) for slot, source in self._starts if isinstance(source, int)]
        if copies:
            sources, slots = zip(*copies, strict=True)
            self.pool.copy(sources, slots)
        for slot, source in self._starts:
            if source is None:
                self.pool.zero(slot)
            elif not isinstance(source, int):
                self.pool.put(slot, source)
        self._starts.clear()

    def keep(self, slot: int, ids_T: IntArray, adapter: int) -> None:
        """Keep a snapshot of a slot's state, which is the one after `ids_T`."""
        if not self.snapshots.has(ids_T, adapter):
            self.snapshots.keep(ids_T, adapter, self.pool.take(slot))

    def forget(self) -> None:
        """Drop what no slot holds: snapshots, and starts that are not yet done."""
        self._starts.clear()
        self.snapshots.clear()

    def release(self) -> None:
        """Free the memory. Nothing may follow."""
        self.forget()
        self.pool.resize(0)
