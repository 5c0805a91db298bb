"""Attention over a pack's prefix tree in parts, each of them one block of queries over one block of keys.

In: queries, keys and values of the computed tokens of a pack, its segments, and the layer's rule. Out: the attention
output, with gradients of queries, keys, values and sinks. Memory is linear in the number of tokens.

With full attention a segment's keys meet its own queries (causal) and all queries of its descendants, which are one
range; the parts are merged by their log-sum-exp. Attention in chunks is full attention over a tree that is cut where
they begin. With a sliding window, each block of queries reads the keys in its
windows, along its path, in one part.

Shape suffixes: H heads, K key/value heads, N computed tokens of a pack, L queries and S keys of a part, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sharpen.learning.trainer.packing import Segment
from sharpen.models.blockwise import (
    ALL,
    CAUSAL,
    Scores,
    Sight,
    attend,
    attend_backward,
    is_fused,
    merge,
    merge_sinks,
    window_block,
    window_mask,
)

_PLAIN_BLOCK = {"cpu": (256, 1024), "cuda": (1024, 4096)}
"""Queries and keys of a part without a fused kernel, whose scores are in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPart:
    """A range of queries in N, the ranges of their keys in order, and what is seen. `first`: no earlier part has these
    queries; the others are merged with it."""

    queries: slice
    keys: tuple[slice, ...]
    sight: Sight
    first: bool


def full_parts(
    segments: Sequence[Segment], below: Sequence[Sequence[slice]], block: tuple[int, int] | None
) -> Iterator[AttentionPart]:
    """Return the parts of full attention; with `block`, of at most that many queries and keys. `below`: for each
    segment the ranges in N of its descendants."""
    for segment in segments:
        own = slice(segment.start, segment.stop)
        for queries in _ranges(own, block[0] if block else None):
            yield AttentionPart(queries=queries, keys=(queries,), sight=CAUSAL, first=True)
            for keys in _ranges(slice(own.start, queries.start), block[1] if block else None):
                yield AttentionPart(queries=queries, keys=(keys,), sight=ALL, first=False)
    for segment, ranges in zip(segments, below, strict=True):
        for queries in (some for run in ranges for some in _ranges(run, block[0] if block else None)):
            for keys in _ranges(slice(segment.start, segment.stop), block[1] if block else None):
                yield AttentionPart(queries=queries, keys=(keys,), sight=ALL, first=False)


def descendants(segments: Sequence[Segment], paths: Sequence[Sequence[int]]) -> list[list[slice]]:
    """Return, for each segment, the ranges in N of those that have it on their path. In a tree that is not cut into
    chunks it is one range, from its `stop` to its `subtree_stop`."""
    runs: list[list[slice]] = [[] for _ in segments]
    for segment, path in zip(segments, paths, strict=True):
        for number in path[:-1]:
            start = segment.start
            if runs[number] and runs[number][-1].stop == start:
                start = runs[number].pop().start
            runs[number].append(slice(start, segment.stop))
    return runs


def chunked(segments: Sequence[Segment], size: int) -> tuple[Segment, ...]:
    """Cut a tree wherever a chunk of `size` positions begins: nothing before that is an ancestor of what follows."""
    cut: list[Segment] = []
    ends: list[tuple[int | None, int]] = []  # of each segment: its last piece, and the position behind it
    for segment in segments:
        parent, position = (None, 0) if segment.parent is None else ends[segment.parent]
        start = segment.start
        while start < segment.stop:
            stop = min(segment.stop, start + size - position % size)
            above = parent if position % size else None
            cut.append(Segment(start=start, stop=stop, subtree_stop=segment.subtree_stop, parent=above))
            parent, position, start = len(cut) - 1, position + stop - start, stop
        ends.append((parent, position))
    return tuple(cut)


def window_parts(
    segments: Sequence[Segment], paths: Sequence[Sequence[int]], window: int, like: torch.Tensor
) -> Iterator[AttentionPart]:
    """Return the parts of a layer with a sliding window, in the order of the queries. `like` has the dtype and device
    of the scores."""
    masks: dict[tuple[int, int], torch.Tensor] = {}
    for segment, path in zip(segments, paths, strict=True):
        offset = sum(segments[part].stop - segments[part].start for part in path[:-1])
        for queries in _ranges(slice(segment.start, segment.stop), window_block(window)):
            end = offset + queries.stop - segment.start
            first = max(0, end - (queries.stop - queries.start) - window + 1)
            shape = (queries.stop - queries.start, end - first)
            if shape not in masks:
                masks[shape] = window_mask(*shape, window, like.dtype, like.device)
            keys = tuple(_along(path, segments, first, end))
            yield AttentionPart(queries=queries, keys=keys, sight=Sight(mask_LS=masks[shape]), first=True)


def _ranges(whole: slice, size: int | None) -> Iterator[slice]:
    """Cut a range into ranges of at most `size`."""
    step = size or max(1, whole.stop - whole.start)
    return (slice(start, min(start + step, whole.stop)) for start in range(whole.start, whole.stop, step))


def _along(path: Sequence[int], segments: Sequence[Segment], first: int, end: int) -> Iterator[slice]:
    """Return the ranges in N of positions first .. end - 1 of a path."""
    position = 0
    for number in path:
        segment = segments[number]
        length = segment.stop - segment.start
        start, stop = max(first - position, 0), min(end - position, length)
        if start < stop:
            yield slice(segment.start + start, segment.start + stop)
        position += length


def block_for(query: torch.Tensor, scores: Scores) -> tuple[int, int] | None:
    """Return the largest numbers of queries and keys of a part; None where a fused kernel holds no scores."""
    return None if is_fused(query, scores) else _PLAIN_BLOCK.get(query.device.type, _PLAIN_BLOCK["cpu"])


class Cascade(torch.autograd.Function):
    """Attention in parts. The backward pass of each part is that of plain attention, given the merged output and
    log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor | None,
        parts: Sequence[AttentionPart],
        scores: Scores,
    ) -> torch.Tensor:
        _, num_heads, num_tokens, head_size = query.shape
        # Token-major, the layout that the output projection reads.
        out = query.new_empty(1, num_tokens, num_heads, head_size).transpose(1, 2)
        lse = query.new_empty(1, num_heads, num_tokens)
        for part in parts:
            at = part.queries
            one, one_lse = attend(query[:, :, at], _take(key, part.keys), _take(value, part.keys), scores, part.sight)
            if part.first:
                out[:, :, at], lse[:, :, at] = one, one_lse
            else:
                merge(out[:, :, at], lse[:, :, at], one, one_lse)
        if sinks_H is not None:
            merge_sinks(out, lse, sinks_H)
        ctx.save_for_backward(query, key, value, sinks_H, out, lse)
        ctx.parts, ctx.scores = parts, scores
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks_H, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for part in ctx.parts:
            at = part.queries
            ones = attend_backward(
                grad_out[:, :, at],
                query[:, :, at],
                _take(key, part.keys),
                _take(value, part.keys),
                out[:, :, at],
                lse[:, :, at],
                ctx.scores,
                part.sight,
            )
            for grad, one, where in zip(grads, ones, ((at,), part.keys, part.keys), strict=True):
                _add(grad, one, where)
        grad_sinks = None
        if sinks_H is not None:
            probability = (sinks_H.to(lse.dtype)[:, None] - lse[0]).exp_()
            grad_sinks = -(probability * (grad_out * out).sum(dim=-1)[0]).sum(dim=-1).to(sinks_H.dtype)
        return (*grads, grad_sinks, None, None)


def _take(tensor: torch.Tensor, ranges: Sequence[slice]) -> torch.Tensor:
    pieces = [tensor[:, :, one] for one in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _add(grad: torch.Tensor, part: torch.Tensor, ranges: Sequence[slice]) -> None:
    """Add the gradient of `_take`'s result."""
    start = 0
    for one in ranges:
        stop = start + one.stop - one.start
        grad[:, :, one] += part[:, :, start:stop]
        start = stop
