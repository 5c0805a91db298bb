"""The tree of a pack through recurrent and convolution layers: every segment starts from the state behind its parent.

In: a layer's input for the computed tokens of a pack, and the pack's segments. Out: the layer's output for them, each
token as if its sequence had been computed alone; gradients flow back through the states. The layer's own forward pass
is called, with the segments of one depth side by side: of equal length where their state is needed afterwards, else
padded behind their end.

Two kinds of segments leave no state. A layer given one token and a state takes a step that changes the state in place,
so a segment of one token is computed as two, and its children begin with its token, from the state before it. And a
layer that cannot go on from a state computes each path from its first token.

Shape suffixes: N computed tokens of a pack, B segments side by side, T tokens of each, K tokens whose output is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sharpen.learning.trainer.packing import IndexArray, Segment
from sharpen.learning.trainer.scores import to_device
from sharpen.models.recurrent import Mixer, States, join_states, row_of

_CHUNK = 64
"""Gated delta nets compute in chunks of this many tokens: padding up to it costs next to nothing."""
_SHORTEST = 0.75
"""Segments of at least this share of the longest are padded to its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A segment as it is computed: `rows_T` are its tokens in N, its own behind those of ancestors without a state.

    `source` is the ancestor with whose state it begins, `depth` the number of such ancestors.
    """

    number: int
    rows_T: IndexArray
    num_own: int
    source: int | None
    depth: int
    leaves_state: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Segments that go through a layer together. `used_K` are the rows of its output, B x T, that are the segments' own
    tokens; `sources` the segments with whose states they begin, `kept` the segments whose states are needed."""

    rows_BT: torch.Tensor
    used_K: torch.Tensor
    sources: tuple[int, ...]
    kept: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """All calls for a pack, parents first. `order_N` puts their used outputs into the order of the pack."""

    calls: tuple[Call, ...]
    order_N: torch.Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device, *, continues: bool) -> Calls:
        """Plan the calls for a pack. `continues`: the layer can go on from a state."""
        batches = _batches(_members(segments, continues=continues))
        own = [member.rows_T[len(member.rows_T) - member.num_own :] for batch in batches for member in batch]
        return cls(
            calls=tuple(_call(batch, device) for batch in batches),
            order_N=to_device(np.argsort(np.concatenate(own)), device),
        )


class Tree(Protocol):
    """A pack's tree (`TreeLayout`)."""

    def recurrent_calls(self, *, continues: bool) -> Calls:
        """Return its calls, planned once for all layers."""


def through_tree(mixer: Mixer, hidden_1NC: torch.Tensor, tree: Tree) -> torch.Tensor:
    """Compute a layer for a pack; shape (1, N, C) before and after."""
    plan = tree.recurrent_calls(continues=mixer.continues)
    hidden_NC = hidden_1NC[0]
    states: dict[int, States] = {}
    outputs = []
    for call in plan.calls:
        hidden_BTC = hidden_NC.index_select(0, call.rows_BT.flatten()).view(*call.rows_BT.shape, -1)
        before = join_states([states[source] for source in call.sources]) if call.sources else {}
        output_BTC, after = mixer.run(hidden_BTC, before)
        states |= {number: row_of(after, row) for row, number in call.kept}
        outputs.append(output_BTC.flatten(0, 1).index_select(0, call.used_K))
    return torch.cat(outputs).index_select(0, plan.order_N)[None]


def _members(segments: Sequence[Segment], *, continues: bool) -> list[_Member]:
    """Return how each segment is computed, parents first."""
    members: list[_Member] = []
    for number, segment in enumerate(segments):
        parent = None if segment.parent is None else members[segment.parent]
        rows_T = np.arange(segment.start, segment.stop)
        source, depth = None, 0
        if parent is not None and parent.leaves_state:
            source, depth = parent.number, parent.depth + 1
        elif parent is not None:
            source, depth = parent.source, parent.depth
            rows_T = np.concatenate([parent.rows_T, rows_T])
        has_children = segment.subtree_stop > segment.stop
        members.append(
            _Member(
                number=number,
                rows_T=rows_T,
                num_own=segment.stop - segment.start,
                source=source,
                depth=depth,
                leaves_state=continues and has_children and (source is None or len(rows_T) > 1),
            )
        )
    return members


def _batches(members: Iterable[_Member]) -> list[list[_Member]]:
    """Put members of one depth together. The first of a batch is its longest; all that leave a state are as long."""
    batches: list[list[_Member]] = []
    for member in sorted(members, key=lambda m: (m.depth, not m.leaves_state, -len(m.rows_T))):
        fitting = [batch for batch in batches if _fits(member, batch[0])]
        if fitting:
            min(fitting, key=lambda batch: len(batch[0].rows_T)).append(member)
        else:
            batches.append([member])
    return batches


def _fits(member: _Member, longest: _Member) -> bool:
    """Whether a member can be computed beside this one."""
    length, most = len(member.rows_T), len(longest.rows_T)
    if member.depth != longest.depth or length > most:
        return False
    if member.leaves_state or most == 1:
        return length == most
    return length >= _SHORTEST * most or most <= _CHUNK


def _call(batch: Sequence[_Member], device: torch.device) -> Call:
    width = len(batch[0].rows_T)
    if batch[0].depth:
        width = max(2, width)
    rows_BT = np.stack([np.pad(member.rows_T, (0, width - len(member.rows_T)), mode="edge") for member in batch])
    ends = [row * width + len(member.rows_T) for row, member in enumerate(batch)]
    used = [np.arange(end - member.num_own, end) for end, member in zip(ends, batch, strict=True)]
    return Call(
        rows_BT=to_device(rows_BT, device),
        used_K=to_device(np.concatenate(used), device),
        sources=tuple(member.source for member in batch if member.source is not None),
        kept=tuple((row, member.number) for row, member in enumerate(batch) if member.leaves_state),
    )
