"""Assigns jobs to slots: admission with prefix reuse, eviction, growth, compaction, suspension.

In: jobs. Out: a slot table whose active slots the next step computes. Policy:

- A job reuses the longest cached prefix of its ids: in place if that slot is retained and has little more KV, else by a
  copy.
- The KV of one adapter is never another's, nor that of the model alone.
- A job that shares at least 16 tokens more with an active job than are cached waits, so that shared tokens are computed
  once.
- In a model with recurrent layers (`states`) a prefix is reused only where a state was kept: at the end of a slot, of a
  prompt but for its last token, and where another job's ids are known to part. A job that is about to pass such a
  place stops there (`SlotRequest.stops`).
- A job whose prompt is scored reuses nothing.
- Slots are added while the least recently used retained slot is still fresh; otherwise that slot is evicted.
- Active slots are kept low and dense, since a step computes all slots up to the highest decoding one.
- If longer slots no longer all fit the budget, the youngest jobs are suspended and placed again later.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from sharpen.engine.embedded.kv import KVPool
from sharpen.engine.embedded.slots import Indices, SlotRequest, SlotTable
from sharpen.engine.embedded.states import SlotStates
from sharpen.models.routing import RouteShape

_SHARED_WORTH_WAITING = 16
_SLACK_WORTH_KEEPING = 16  # a retained slot with more KV than this beyond the shared prefix is copied, not overwritten
_FRESH_STEPS = 64
_SPARSE_ROWS = 4
_POSITIONS_A_ROW = 32
"""About how many positions of KV are copied in the time of one row of a decode step: by what a CPU computes and moves,
some 20 of the quickstart's model, some 65 of one of 0.6B."""


class Scheduler:
    """Keeps the waiting jobs, the slot table, the KV pool and the recurrent states consistent."""

    def __init__(self, pool: KVPool, *, routes: RouteShape | None = None, states: SlotStates | None = None) -> None:
        """`routes` is the shape of the experts of a token; None for a dense model. `states` are those of a model with
        recurrent or convolution layers."""
        self.pool = pool
        self.states = states
        self.table = SlotTable(routes)
        self.table.resize(pool.num_slots, pool.length)
        self.waiting: deque[SlotRequest] = deque()
        self.now = 0
        self.reused_tokens = 0
        self.moved_positions = 0
        self._copies: list[tuple[int, int, int]] = []  # (source, target, positions), not yet done
        self._idle_rows = 0  # rows that steps computed for nothing since slots became sparse
        self._poisoned = False
        if states is not None:
            states.pool.resize(pool.num_slots)

    @property
    def busy(self) -> bool:
        """Whether any job waits or runs."""
        return bool(self.waiting) or bool(self.table.active_S.any())

    def running(self) -> list[tuple[int, SlotRequest]]:
        """Return (slot, job) of every active slot."""
        return [(slot, job) for slot, job in enumerate(self.table.jobs) if job is not None]

    def admit(self) -> None:
        """Place every waiting job for which there is a slot and no shared prefix to wait for."""
        self.now += 1
        kept: deque[SlotRequest] = deque()
        full = False
        while self.waiting:
            job = self.waiting.popleft()
            if full or not self._try_place(job):
                kept.append(job)
                full = full or not self._has_room()
        self.waiting = kept
        self._do_copies()

    def _do_copies(self) -> None:
        if self._copies:
            moves = [(source, target) for source, target, _ in self._copies]
            self.pool.copy(moves, [length for _, _, length in self._copies])
            self._copies.clear()
        if self.states is not None:
            self.states.settle()

    def _has_room(self) -> bool:
        table = self.table
        evictable = ~table.active_S & (table.last_used_S < self.now)
        return bool(evictable.any()) or table.num_slots < self.pool.slots_at(self.pool.length)

    def _try_place(self, job: SlotRequest) -> bool:
        table = self.table
        if len(job.ids_T) > self.pool.length:
            self._lengthen(len(job.ids_T))
        shared_S = np.minimum(table.common_prefix(job.ids_T, job.adapter), len(job.ids_T) - 1)
        if job.scores is not None:
            shared_S[:] = 0  # KV has no logits: all of its prompt is computed
        cached_S = np.minimum(shared_S, table.kv_len_S)
        cached_S[[target for _, target, _ in self._copies]] = 0  # not a source yet: its own copy is still pending
        known = int(cached_S.max())
        coming_S = np.where(table.active_S, shared_S, 0)
        if self.states is not None:
            cached_S = self.states.usable(job.ids_T, job.adapter, cached_S, table.kv_len_S)
            coming_S[table.kv_len_S > shared_S] = 0  # gone by: it will not have that state
        # Of equally good sources prefer a retained one with little more KV: it can be reused in place.
        source = int(np.lexsort((table.kv_len_S + table.active_S * (1 << 40), -cached_S))[0])
        cached = int(cached_S[source])
        if coming_S.max() - cached >= _SHARED_WORTH_WAITING:
            self._stop_at(int(coming_S.argmax()), int(coming_S.max()))
            return False
        slot = self._choose_slot(source, cached)
        if slot is None:
            return False
        if cached:
            table.last_used_S[source] = self.now
            if slot != source:
                self._copies.append((source, slot, cached))
                table.copy_routes(source, slot, cached)
        self.reused_tokens += cached
        if self.states is not None:
            self.states.start(slot, source, job.ids_T[:cached], job.adapter, int(table.kv_len_S[source]))
        table.place(slot, job, cached, self.now)
        if known - cached >= _SHARED_WORTH_WAITING:
            self._stop_at(slot, known)
        return True

    def _stop_at(self, slot: int, position: int) -> None:
        """Let the job in `slot` stop at a position that another job's ids reach, so that its state there is kept. Of
        several such places close to each other the first is enough."""
        job = self.table.jobs[slot]
        if self.states is None or job is None:
            return
        near = {stop for stop in job.stops if abs(stop - position) < _SHARED_WORTH_WAITING}
        job.stops = (job.stops - near) | {min([position, *near])}

    def computed(self, slot: int, position: int) -> None:
        """Note that `slot` has the KV, and the state, of its first `position` ids. Keep the state if others may begin
        there."""
        self.table.kv_len_S[slot] = position
        job = self.table.jobs[slot]
        if self.states is not None and job is not None and (position in job.stops or position == job.num_prompt - 1):
            self.states.keep(slot, self.table.ids_ST[slot, :position], job.adapter)

    def _choose_slot(self, source: int, cached: int) -> int | None:
        table = self.table
        retained_source = not table.active_S[source]
        # The source of an earlier pending copy may be reused too: the copy reads positions that this job keeps.
        slack = _SLACK_WORTH_KEEPING if self.states is None else 0  # a state that is overwritten is lost whole
        if cached and retained_source and table.kv_len_S[source] - cached <= slack:
            return source
        free = np.flatnonzero(~table.active_S & (table.kv_len_S == 0) & (table.last_used_S < self.now))
        if len(free):
            return int(free[0])
        oldest = self._oldest_retained(excluded=source)
        stale = oldest is not None and self.now - table.last_used_S[oldest] > _FRESH_STEPS
        if not stale and self._add_slots():
            return int(np.flatnonzero(~table.active_S & (table.kv_len_S == 0))[0])
        if oldest is not None:
            table.forget(oldest)
            return oldest
        if retained_source and table.last_used_S[source] < self.now:
            return source
        return None

    def _oldest_retained(self, excluded: int) -> int | None:
        table = self.table
        candidates = np.flatnonzero(~table.active_S & (table.last_used_S < self.now))
        candidates = candidates[candidates != excluded]
        return int(candidates[table.last_used_S[candidates].argmin()]) if len(candidates) else None

    def _add_slots(self) -> bool:
        allowed = self.pool.slots_at(self.pool.length)
        if self.table.num_slots >= allowed:
            return False
        self._resize(min(allowed, 2 * self.table.num_slots), self.pool.length)
        return True

    def _resize(self, num_slots: int, length: int) -> None:
        self.pool.resize(num_slots, length, kept=self.table.kv_len_S.tolist())
        self.table.resize(num_slots, length)
        if self.states is not None:
            self.states.pool.resize(num_slots)

    def reserve(self) -> None:
        """Make room for the KV of every active slot's ids. Called before a step computes them."""
        needed = int(self.table.num_ids_S[self.table.active_S].max(initial=0))
        if needed > self.pool.length:
            self._lengthen(needed)

    def _lengthen(self, needed: int) -> None:
        self._do_copies()  # slots are renumbered below
        length = self.pool.longer(needed)
        num_slots = min(self.table.num_slots, self.pool.slots_at(length))
        for _, job in sorted(self.running(), key=lambda pair: pair[1].order)[num_slots:]:
            self.suspend(job)
        for slot in np.flatnonzero(self.table.active_S):
            if slot >= num_slots:
                self._swap(int(np.flatnonzero(~self.table.active_S[:num_slots])[0]), int(slot))
        self._resize(num_slots, length)

    def suspend(self, job: SlotRequest) -> None:
        """Take a running job out of its slot; it is placed again before the waiting jobs."""
        slot = self.table.jobs.index(job)
        self.waiting.appendleft(self.table.suspend(slot, self.now))

    def suspend_all(self) -> None:
        """Take every running job out of its slot, and drop all KV."""
        for _, job in sorted(self.running(), key=lambda pair: -pair[1].order):
            self.suspend(job)
        self.forget_all()
        if self._poisoned:
            self.pool.zero_all()
            self._poisoned = False

    def suspend_adapter(self, adapter: int) -> None:
        """Take the running jobs of one adapter out of their slots, and drop all KV and states that it has computed."""
        mine = [job for _, job in self.running() if job.adapter == adapter]
        for job in sorted(mine, key=lambda job: -job.order):
            self.suspend(job)
        for slot in np.flatnonzero(~self.table.active_S & (self.table.adapter_S == adapter)):
            self.table.forget(int(slot))
        if self.states is not None:
            self.states.snapshots.drop(adapter)

    def forget_all(self) -> None:
        """Drop all retained KV and states."""
        for slot in np.flatnonzero(~self.table.active_S):
            self.table.forget(int(slot))
        if self.states is not None:
            self.states.forget()

    def clear(self) -> None:
        """Drop all KV and states, and zero the KV, after a failure within a step. No job may be running."""
        self._copies.clear()
        self.forget_all()
        self.pool.zero_all()

    def discard(self, slot: int) -> None:
        """End the job in `slot` and zero its KV, which may contain a NaN; drop all that is retained, which may too. A
        state is zeroed when the next job begins with it."""
        self.table.retire(slot, self.now)
        self.forget_all()
        self.pool.zero(slot)
        self._poisoned = True

    def compact(self) -> None:
        """If active slots are sparse, move the highest ones into the lowest inactive slots, once that is no more work
        than the rows that were computed for nothing since they became so: agents soon come back to slots that their
        calls left."""
        active = np.flatnonzero(self.table.active_S)
        idle = int(active[-1]) + 1 - len(active) if len(active) else 0
        if idle <= max(_SPARSE_ROWS, len(active) // 8):
            self._idle_rows = 0
            return
        self._idle_rows += idle
        high = active[active >= len(active)]
        low = np.flatnonzero(~self.table.active_S[: len(active)])
        moved = int(self.table.kv_len_S[high].sum() + self.table.kv_len_S[low].sum())
        if self._idle_rows * _POSITIONS_A_ROW >= moved:
            self._idle_rows = 0
            self._swap_many(low, high)

    def _swap(self, one: int, other: int) -> None:
        self._swap_many(np.array([one]), np.array([other]))

    def _swap_many(self, ones: Indices, others: Indices) -> None:
        pairs = [(int(one), int(other)) for one, other in zip(ones, others, strict=True)]
        moves = [(source, target) for one, other in pairs for source, target in ((one, other), (other, one))]
        lengths = [int(self.table.kv_len_S[source]) for source, _ in moves]
        self.moved_positions += sum(lengths)
        self.pool.copy(moves, lengths)
        if any(lengths) and self.states is not None:
            sources, targets = zip(*moves, strict=True)
            self.states.pool.copy(sources, targets)
        for one, other in pairs:
            self.table.swap(one, other)

    def remove(self, job: SlotRequest) -> None:
        """Remove a job whose result is no longer needed, whether it waits or runs."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self.table.jobs:
            self.table.retire(self.table.jobs.index(job), self.now)
