"""Chooses the tokens that one step computes, and lays them out as rows.

In: the slot table. Out: `StepBatch`es of flat arrays. The fast layout puts decode rows first (row r is slot r, so
rows of slots that are not decoding are wasted), then prompt segments, then padding to a round number of rows. The fixed
layout, for the deterministic mode, cuts all tokens into chunks of one fixed shape.

Array shape suffixes: N rows, R rows that are sampled from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sharpen.engine.embedded.attention import SharedPrefix, SlotSegment
from sharpen.engine.embedded.kv import LENGTH_BUCKET, bucketed
from sharpen.engine.embedded.slots import Indices, SlotTable

FIXED_ROWS = 64
"""Rows of a chunk in the deterministic mode."""

_ROW_BUCKET = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Rows of one slot whose next token is one of its prompt, which is scored; and their positions."""

    slot: int
    row_X: Indices
    position_X: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The rows of one forward pass. `slot_N` is the slot that each row's KV is written to,
    `adapter_N` the number of the adapter that computes the row.

    Tokens are sampled from `rows_R`, for the slots `slots_R`. `computed` holds (slot, number of positions with KV
    afterwards). Of the first `num_decode` rows those of the slots `decoding` are real. In the fixed layout there are no
    decode rows or segments, and each row is computed separately. `scored` are the rows of prompts that are scored,
    `shared` what decode rows have in common.
    """

    token_N: Indices
    position_N: Indices
    slot_N: Indices
    adapter_N: Indices
    num_decode: int
    decoding: Indices
    kv_length: int
    segments: tuple[SlotSegment, ...]
    rows_R: Indices
    slots_R: Indices
    computed: tuple[tuple[int, int], ...]
    scored: tuple[Scored, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The tokens that a step computes: decoding slots (one token each), and spans (slot, start, end) of prompts."""

    decoding: Indices
    spans: tuple[tuple[int, int, int], ...]


def collect_work(table: SlotTable, token_budget: int, score_budget: int, *, stateful: bool = False) -> StepWork:
    """Choose the tokens of a step: slots with one token to compute decode; the others compute up to `token_budget`
    prompt tokens together, oldest job first, up to `score_budget` of them of prompts that are scored. If `stateful`, a
    span ends at its job's next stop, and before the last token at the latest."""
    todo_S = np.where(table.active_S, table.num_ids_S - table.kv_len_S, 0)
    behind = [int(slot) for slot in np.flatnonzero(todo_S > 1)]
    behind.sort(key=lambda slot: job.order if (job := table.jobs[slot]) is not None else 0)
    spans = []
    for slot in behind:
        if token_budget <= 0:
            break
        scored = _is_scored(table, slot)
        if scored and score_budget <= 0:
            continue
        start = int(table.kv_len_S[slot])
        end = min(int(table.num_ids_S[slot]), start + (min(token_budget, score_budget) if scored else token_budget))
        if stateful and (job := table.jobs[slot]) is not None:
            stops = (stop for stop in job.stops if stop > start)
            end = min(end, int(table.num_ids_S[slot]) - 1, *stops)
        end = _beside_blocks(table, slot, start, end)
        spans.append((slot, start, end))
        token_budget -= end - start
        score_budget -= end - start if scored else 0
    return StepWork(decoding=np.flatnonzero(todo_S == 1), spans=tuple(spans))


def _beside_blocks(table: SlotTable, slot: int, start: int, end: int) -> int:
    """Return an end of a span that cuts through no image whose tokens attend both ways."""
    for first, stop in _blocks(table, slot):
        if first < end < stop:
            return first if first > start else stop
    return end


def _is_scored(table: SlotTable, slot: int) -> bool:
    job = table.jobs[slot]
    return job is not None and job.scores is not None


def _scored(table: SlotTable, slot: int, row_X: Indices, position_X: Indices) -> tuple[Scored, ...]:
    """Return the rows of a slot before another token of its prompt, if that is scored."""
    if not _is_scored(table, slot):
        return ()
    before_X = position_X + 1 < table.num_prompt_S[slot]
    return (Scored(slot=slot, row_X=row_X[before_X], position_X=position_X[before_X]),) if before_X.any() else ()


def _blocks(table: SlotTable, slot: int) -> tuple[tuple[int, int], ...]:
    job = table.jobs[slot]
    return () if job is None or job.pictures is None else job.pictures.blocks


def on_device(values: Indices | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy an array or CPU tensor to a device. For a GPU it is pinned first: a copy from unpinned memory would wait for
    the forward pass and leave the GPU idle."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def padded_rows(count: int) -> int:
    """Round a number of rows up, so that kernels see few shapes."""
    if count <= 8:
        return 1 << (count - 1).bit_length() if count > 1 else count
    bucket = max(_ROW_BUCKET, 1 << (count - 1).bit_length() - 4)  # adds at most an eighth
    return -(-count // bucket) * bucket


def lay_out(table: SlotTable, work: StepWork, scratch: int, worth_sharing: int | None) -> StepBatch:
    """Lay the work out in the fast layout. `scratch` is the slot of padding rows; `worth_sharing` as in
    `shared_prefixes` (None: nothing is)."""
    decoding = work.decoding
    num_decode = min(padded_rows(int(decoding[-1]) + 1), table.num_slots) if len(decoding) else 0
    num_rows = padded_rows(num_decode + sum(end - start for _, start, end in work.spans))
    token_N = np.zeros(num_rows, np.int64)
    position_N = np.zeros(num_rows, np.int64)
    slot_N = np.full(num_rows, scratch, np.int64)
    adapter_N = np.zeros(num_rows, np.int64)
    kv_length = 0
    if num_decode:
        last_S = table.kv_len_S[decoding]
        token_N[decoding] = table.tokens(decoding, last_S)
        position_N[decoding] = last_S
        slot_N[decoding] = decoding
        adapter_N[decoding] = table.adapter_S[decoding]
        kv_length = bucketed(int(last_S.max()) + 1)
    segments, end_rows, end_slots = [], [], []
    scored: tuple[Scored, ...] = ()
    row = num_decode
    for slot, start, end in work.spans:
        rows = slice(row, row + end - start)
        token_N[rows] = table.tokens(slot, slice(start, end))
        position_N[rows] = np.arange(start, end)
        slot_N[rows] = slot
        adapter_N[rows] = table.adapter_S[slot]
        blocks = tuple(block for block in _blocks(table, slot) if start <= block[0] and block[1] <= end)
        segments.append(SlotSegment(slot=slot, first_row=row, start=start, end=end, blocks=blocks))
        scored += _scored(table, slot, np.arange(row, rows.stop), np.arange(start, end))
        row = rows.stop
        if end == table.num_ids_S[slot]:
            end_rows.append(row - 1)
            end_slots.append(slot)
    return StepBatch(
        token_N=token_N,
        position_N=position_N,
        slot_N=slot_N,
        adapter_N=adapter_N,
        num_decode=num_decode,
        decoding=decoding,
        kv_length=kv_length,
        segments=tuple(segments),
        rows_R=np.concatenate([decoding, np.array(end_rows, np.int64)]),
        slots_R=np.concatenate([decoding, np.array(end_slots, np.int64)]),
        computed=_computed(table, work),
        scored=scored,
        shared=() if worth_sharing is None else tuple(shared_prefixes(table, decoding, worth_sharing)),
    )


def shared_prefixes(table: SlotTable, decoding: Indices, worth: int) -> Iterator[SharedPrefix]:
    """Yield what decoding slots have in common: ids from the first on, and the adapter that computes them. A prefix is
    there if that saves reading `worth` positions of other slots; it ends at a multiple of `LENGTH_BUCKET`. What fewer
    slots have in common follows on it."""
    left = [(decoding[table.adapter_S[decoding] == adapter], 0, 0) for adapter in np.unique(table.adapter_S[decoding])]
    while left:
        slot_M, known, first = left.pop()
        have_M = table.kv_len_S[slot_M]
        if len(slot_M) < 2 or (int(have_M.max()) - first) * (len(slot_M) - 1) < worth:
            continue
        shortest = int(have_M.min())
        ids_MT = table.ids_ST[slot_M, known:shortest]
        differs_T = (ids_MT != ids_MT[0]).any(axis=0)
        parts = known + int(differs_T.argmax()) if differs_T.any() else shortest
        end = parts // LENGTH_BUCKET * LENGTH_BUCKET
        if end > first and (end - first) * (len(slot_M) - 1) >= worth:
            yield SharedPrefix(rows=tuple(slot_M.tolist()), first=first, end=end)
            first = end
        if parts == shortest:
            left.append((slot_M[have_M > shortest], parts, first))
        else:
            id_M = table.ids_ST[slot_M, parts]
            left += [(slot_M[id_M == token], parts, first) for token in np.unique(id_M)]


def _computed(table: SlotTable, work: StepWork) -> tuple[tuple[int, int], ...]:
    decoded = [(int(slot), int(table.num_ids_S[slot])) for slot in work.decoding]
    return (*decoded, *((slot, end) for slot, _, end in work.spans))


def lay_out_fixed(table: SlotTable, work: StepWork, scratch: int) -> list[StepBatch]:
    """Lay the work out in the fixed layout: chunks of `FIXED_ROWS` tokens whose positions share one length bucket, in
    the order of positions."""
    spans = [(int(slot), int(table.kv_len_S[slot]), int(table.num_ids_S[slot])) for slot in work.decoding]
    spans += work.spans
    slot_X = np.concatenate([np.full(end - start, slot, np.int64) for slot, start, end in spans])
    position_X = np.concatenate([np.arange(start, end, dtype=np.int64) for _, start, end in spans])
    batches = []
    bucket_X = position_X // LENGTH_BUCKET
    for bucket in np.unique(bucket_X):
        members = np.flatnonzero(bucket_X == bucket)
        for first in range(0, len(members), FIXED_ROWS):
            rows = members[first : first + FIXED_ROWS]
            batches.append(_fixed_chunk(table, slot_X[rows], position_X[rows], scratch))
    return batches


def _fixed_chunk(table: SlotTable, slots: Indices, positions: Indices, scratch: int) -> StepBatch:
    count = len(slots)
    token_N = np.zeros(FIXED_ROWS, np.int64)
    position_N = np.full(FIXED_ROWS, positions[0], np.int64)
    slot_N = np.full(FIXED_ROWS, scratch, np.int64)
    token_N[:count] = table.tokens(slots, positions)
    position_N[:count] = positions
    slot_N[:count] = slots
    adapter_N = np.zeros(FIXED_ROWS, np.int64)
    adapter_N[:count] = table.adapter_S[slots]
    sampled = np.flatnonzero(positions == table.num_ids_S[slots] - 1)
    scored: tuple[Scored, ...] = ()
    for slot in np.unique(slots):
        row_X = np.flatnonzero(slots == slot)
        scored += _scored(table, int(slot), row_X, positions[row_X])
    return StepBatch(
        token_N=token_N,
        position_N=position_N,
        slot_N=slot_N,
        adapter_N=adapter_N,
        num_decode=0,
        decoding=np.zeros(0, np.int64),
        kv_length=bucketed(int(positions[0]) + 1),
        segments=(),
        rows_R=sampled,
        slots_R=slots[sampled],
        computed=tuple((int(slot), int(position) + 1) for slot, position in zip(slots, positions, strict=True)),
        scored=scored,
    )
