"""Packs sequences into micro-batches without padding, computing shared prefixes once.

In: the `Experience`s of an update. Out: `Pack`s. The sequences of a pack form a prefix tree: a system prompt shared
by groups, a prompt shared by the rollouts of a group, and the history shared by the forks of a rollout are each one
segment. Computed tokens (N) and loss entries (E) are separate: one hidden state may predict the next token of many
sequences.

Shape suffixes: T tokens of one sequence, N computed tokens of a pack, E loss tokens of a pack, F those of the
environment between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sharpen.engine.token_masks import TokenMasks
from sharpen.errors import CallError
from sharpen.learning.trainer.constrained import ConstrainedCall, ConstrainedEntries
from sharpen.models.marks import Marks, Shown, image_tokens
from sharpen.types import BoolArray, Experience, FloatArray, IntArray, RouteArray

IndexArray = npt.NDArray[np.int64]

MIN_SHARED_TOKENS = 8
"""Shorter shared runs are not split off but computed again, since each segment needs its own attention calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens in a pack: `start:stop` in N. Each attends to the ancestors, and to the segment up to itself.

    Segments are stored depth first: a parent comes before its children, and the descendants of a segment follow it
    directly, in `stop:subtree_stop`.
    """

    start: int
    stop: int
    subtree_stop: int
    parent: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One micro-batch.

    `predict_E` is the index in N of the token whose hidden state predicts the entry's target. `rollouts_E` indexes
    `rollout_ids`, which is the same for all packs of an update; `tokens_E` is the target's position in its sequence.
    `truncated_E` is whether the target was sampled from a truncated distribution, which `logprobs_E` is then of, and
    whose support is not known. `constrained` has the masks of the entries that were sampled under a constraint, or
    whose support is known; None if there are none.
    `num_sequence_tokens` is the length of all sequences, counting shared prefixes each time.

    `routes_NLK` are the experts that the engine chose for each computed token, in a mixture of experts; None lets the
    model choose. Engines may choose others for the same token, if they computed it at different times: a shared token
    is computed once, with those of the first sequence that it belongs to. `rerouted_E` marks the entries of sequences
    that have a token with other experts than their own, of which there are `num_rerouted_tokens`.

    `shown` are the images among the computed tokens. Sequences have a common segment only where their images are the
    same, not just the ids. `teacher` is the name of the one that scores all sequences of the pack.
    `told` has the same entries in the same order, each behind what its teacher is told; None if that is nothing else.

    `echo_predict_F` and `echo_targets_F` are, as for entries, the tokens that the environment put between calls (F).
    """

    ids_N: IndexArray
    positions_N: IndexArray
    segments: tuple[Segment, ...]
    predict_E: IndexArray
    targets_E: IndexArray
    logprobs_E: FloatArray
    advantages_E: FloatArray
    weights_E: FloatArray
    temperatures_E: FloatArray
    versions_E: IntArray
    rollouts_E: IndexArray
    calls_E: IntArray
    tokens_E: IndexArray
    truncated_E: BoolArray
    rollout_ids: tuple[str, ...]
    num_sequences: int
    num_sequence_tokens: int
    constrained: ConstrainedEntries | None = None
    routes_NLK: RouteArray | None = None
    rerouted_E: BoolArray | None = None
    num_rerouted_tokens: int = 0
    shown: tuple[Shown, ...] = ()
    echo_predict_F: IndexArray = field(default_factory=lambda: np.empty(0, np.int64))
    echo_targets_F: IndexArray = field(default_factory=lambda: np.empty(0, np.int64))
    teacher: str = ""
    told: Pack | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.ids_N)

    @property
    def num_trained_tokens(self) -> int:
        """The number of loss entries."""
        return len(self.targets_E)

    def comparable_E(self, version: int) -> BoolArray:
        """Return whether each entry was sampled by this policy version, from a distribution that is known, and is
        computed with the experts that the engine chose."""
        comparable_E: BoolArray = (self.versions_E == version) & ~self.truncated_E
        return comparable_E if self.rerouted_E is None else comparable_E & ~self.rerouted_E

    def with_echo(self) -> Pack:
        """Return the pack with these tokens as further entries, at temperature 1 and without an advantage."""
        count = len(self.echo_targets_F)
        if not count:
            return self
        further: dict[str, Any] = {
            name: np.concatenate([values_E, np.full(count, filler, values_E.dtype)])
            for name, filler in _FILLERS.items()
            if (values_E := getattr(self, name)) is not None
        }
        return replace(
            self,
            predict_E=np.concatenate([self.predict_E, self.echo_predict_F]),
            targets_E=np.concatenate([self.targets_E, self.echo_targets_F]),
            **further,
        )

    @property
    def call_numbers_E(self) -> IndexArray:
        """Return for each loss entry the number of its call within the pack. A call is never split over packs."""
        keys_E = self.rollouts_E * (int(self.calls_E.max(initial=0)) + 1) + self.calls_E
        numbers_E: IndexArray = np.unique(keys_E, return_inverse=True)[1]
        return numbers_E


_FILLERS = {
    **dict.fromkeys(("logprobs_E", "advantages_E", "weights_E"), 0.0),
    "temperatures_E": 1.0,
    **dict.fromkeys(("versions_E", "rollouts_E", "calls_E", "tokens_E"), -1),
    **dict.fromkeys(("truncated_E", "rerouted_E"), False),
}
"""What entries that no engine sampled have in the arrays of a pack."""


@dataclass(slots=True)
class _Node:
    """A run of ids in the tree being built, image tokens marked. `sequences` are the numbers of those that end within
    it."""

    ids: IntArray
    children: list[_Node] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)

    def copy(self) -> _Node:
        return _Node(self.ids, [child.copy() for child in self.children], list(self.sequences))


def pack(
    experiences: Sequence[Experience],
    max_tokens: int,
    *,
    masks: TokenMasks | None = None,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
) -> list[Pack]:
    """Pack sequences in the given order, with at most `max_tokens` computed tokens per pack. A longer sequence gets its
    own pack, with others as long as it is at most a quarter longer: a long prompt is then not computed again for every
    answer.

    The sequences of a group stay together if they fit; those of different teachers never share a pack. Sequences
    without loss tokens are left out. `masks` are those of the model whose engine sampled the tokens, for calls with a
    constraint. Raises `CallError` if the first token of a sequence carries loss, because nothing predicts it, or if a
    call has a constraint and there are no `masks`.
    """
    rollout_ids = tuple(dict.fromkeys(experience.rollout_id for experience in experiences))
    packs: list[Pack] = []
    for teacher in dict.fromkeys(experience.teacher for experience in experiences):
        own = [experience for experience in experiences if experience.teacher == teacher]
        found = _packed(own, max_tokens, rollout_ids, masks, min_shared_tokens)
        packs += found if not teacher else [replace(one, teacher=teacher) for one in found]
    return packs


def _packed(
    experiences: Sequence[Experience],
    max_tokens: int,
    rollout_ids: tuple[str, ...],
    masks: TokenMasks | None,
    min_shared_tokens: int,
) -> list[Pack]:
    """Pack the sequences of one teacher."""
    packs = []
    builder = _Builder(max_tokens, min_shared_tokens, masks)
    for group in _groups(experiences):
        if builder.add(group):
            continue
        if not builder.empty:
            packs.append(builder.build(rollout_ids))
            builder = _Builder(max_tokens, min_shared_tokens, masks)
        if builder.add(group):
            continue
        for experience in sorted(group, key=lambda member: member.ids_T.tolist()):  # so that neighbours share most
            if not builder.add([experience]):
                packs.append(builder.build(rollout_ids))
                builder = _Builder(max_tokens, min_shared_tokens, masks)
                builder.add([experience])
    if not builder.empty:
        packs.append(builder.build(rollout_ids))
    return packs


class _Builder:
    """Builds one pack."""

    def __init__(self, max_tokens: int, min_shared: int, masks: TokenMasks | None) -> None:
        self._max_tokens = max_tokens
        self._masks = masks
        self._min_shared = min_shared
        self._marks = Marks()
        self._chosen: list[Experience] = []
        self._root = _Node(np.empty(0, np.int32))
        self._num_tokens = 0
        self._longest = 0

    @property
    def empty(self) -> bool:
        return not self._chosen

    def add(self, unit: Sequence[Experience]) -> bool:
        """Add all of `unit` if it fits, else nothing; return whether it was added. A single sequence always fits into
        an empty pack."""
        root, added = self._root.copy(), 0
        for number, experience in enumerate(unit, start=len(self._chosen)):
            ids = self._marks.marked(experience.ids_T, experience.pictures)[: len(_computed_ids(experience))]
            added += _insert(root, ids, number, self._min_shared)
        alone = self.empty and len(unit) == 1
        longest = max(self._longest, *(len(_computed_ids(experience)) for experience in unit))
        limit = self._max_tokens if longest <= self._max_tokens else longest + longest // 4
        if self._num_tokens + added > limit and not alone:
            return False
        self._longest = longest
        self._chosen.extend(unit)
        self._root, self._num_tokens = root, self._num_tokens + added
        return True

    def build(self, rollout_ids: tuple[str, ...]) -> Pack:
        """Lay out the tree depth first, and collect the loss entries of every sequence."""
        segments: list[Segment] = []
        positions: list[IndexArray] = []
        indices: dict[int, IndexArray] = {}

        def visit(node: _Node, parent: int | None, start: int, path: IndexArray) -> int:
            number, stop = len(segments), start + len(node.ids)
            positions.append(np.arange(len(path), len(path) + len(node.ids)))
            path = np.concatenate([path, np.arange(start, stop)])
            indices.update((sequence, path) for sequence in node.sequences)
            segments.append(Segment(start=start, stop=stop, subtree_stop=stop, parent=parent))
            end = stop
            for child in node.children:
                end = visit(child, number, end, path)
            segments[number] = replace(segments[number], subtree_stop=end)
            return end

        end = 0
        for top in self._root.children:
            end = visit(top, None, end, np.empty(0, np.int64))
        assert end == self._num_tokens
        ids_N = np.zeros(end, np.int64)
        for number, path in indices.items():
            ids = _computed_ids(self._chosen[number])
            indices[number] = path[: len(ids)]  # a sequence may end within a run that others go on with
            ids_N[indices[number]] = ids
        entries = _entries(self._chosen, indices, rollout_ids)
        return Pack(
            ids_N=ids_N,
            positions_N=np.concatenate(positions),
            segments=tuple(segments),
            rollout_ids=rollout_ids,
            num_sequences=len(self._chosen),
            num_sequence_tokens=sum(len(experience.ids_T) for experience in self._chosen),
            constrained=_constrained(self._chosen, self._masks),
            shown=_shown(self._chosen, indices, segments),
            told=self._told(rollout_ids),
            **entries,
            **_routes(self._chosen, indices, end),
        )

    def _told(self, rollout_ids: tuple[str, ...]) -> Pack | None:
        """The pack for the teacher. It is computed without a gradient, so that no limit holds."""
        if all(one.told_P is None for one in self._chosen):
            return None
        told = [as_told(one) for one in self._chosen]
        builder = _Builder(sum(len(one.ids_T) for one in told), self._min_shared, self._masks)
        for one in told:
            added = builder.add([one])
            assert added
        return builder.build(rollout_ids)


def as_told(experience: Experience) -> Experience:
    """Return a sequence as its teacher reads it: its own tokens, one by one, behind what it is told."""
    if experience.told_P is None:
        return experience
    kept, added = slice(experience.num_untold, None), len(experience.told_P)

    def behind(array_T: npt.NDArray[Any], fill: float) -> npt.NDArray[Any]:
        return np.concatenate([np.full(added, fill, array_T.dtype), array_T[kept]])

    return replace(
        experience,
        ids_T=np.concatenate([experience.told_P, experience.ids_T[kept]]).astype(np.int32),
        loss_mask_T=behind(experience.loss_mask_T, False),
        logprobs_T=behind(experience.logprobs_T, 0.0),
        versions_T=behind(experience.versions_T, -1),
        calls_T=behind(experience.calls_T, -1),
        temperatures_T=behind(experience.temperatures_T, 1.0),
        advantages_T=behind(experience.advantages_T, 0.0),
        weights_T=behind(experience.weights_T, 0.0),
        routes_NLK=None,
        shown_T=None,
        told_P=None,
    )


def _groups(experiences: Sequence[Experience]) -> list[list[Experience]]:
    """Return the sequences with loss by group, in the order in which groups first appear."""
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        if experience.loss_mask_T.any():
            groups.setdefault(experience.group_id, []).append(experience)
    return list(groups.values())


def _computed_ids(experience: Experience) -> IntArray:
    """Return the ids up to the last one that predicts a target."""
    targets = np.flatnonzero(experience.loss_mask_T)
    if targets[0] == 0:
        raise CallError(f"rollout {experience.rollout_id}: its first token carries loss, but nothing predicts it")
    return experience.ids_T[: targets[-1]]


def _insert(node: _Node, ids: IntArray, sequence: int, min_shared: int) -> int:
    """Add a sequence below `node`, and return the number of tokens that this added."""
    while True:
        shared, child = 0, node
        for candidate in node.children:
            length = _common_length(candidate.ids, ids)
            if length > shared:
                shared, child = length, candidate
        if shared == len(ids):
            child.sequences.append(sequence)
            return 0
        if shared == 0 or shared < min(min_shared, len(child.ids)):
            node.children.append(_Node(ids, [], [sequence]))
            return len(ids)
        if shared < len(child.ids):
            tail = _Node(child.ids[shared:], child.children, child.sequences)
            child.ids, child.children, child.sequences = child.ids[:shared], [tail], []
        node, ids = child, ids[shared:]


def _common_length(first: IntArray, second: IntArray) -> int:
    """Return the length of the common prefix."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(np.argmax(differ)) if differ.any() else length


def _entries(
    experiences: Sequence[Experience], indices: Mapping[int, IndexArray], rollout_ids: tuple[str, ...]
) -> dict[str, Any]:
    """Return the `*_E` and `*_F` arrays of a pack, sequence by sequence; `indices` has each sequence's token indices in
    N."""
    numbers = {rollout_id: number for number, rollout_id in enumerate(rollout_ids)}
    columns: dict[str, list[npt.NDArray[Any]]] = {}

    def put(**arrays: npt.NDArray[Any]) -> None:
        for name, array in arrays.items():
            columns.setdefault(name, []).append(array)

    for sequence, experience in enumerate(experiences):
        targets = np.flatnonzero(experience.loss_mask_T)
        put(
            predict_E=indices[sequence][targets - 1],
            targets_E=experience.ids_T[targets].astype(np.int64),
            logprobs_E=experience.logprobs_T[targets],
            advantages_E=experience.advantages_T[targets],
            weights_E=experience.weights_T[targets],
            temperatures_E=experience.temperatures_T[targets],
            versions_E=experience.versions_T[targets],
            rollouts_E=np.full(len(targets), numbers[experience.rollout_id], np.int64),
            calls_E=experience.calls_T[targets],
            tokens_E=targets,
            truncated_E=experience.truncated_T[targets],
        )
        shown = np.flatnonzero(experience.shown_T) if experience.shown_T is not None else np.empty(0, np.int64)
        put(echo_predict_F=indices[sequence][shown - 1], echo_targets_F=experience.ids_T[shown].astype(np.int64))
    return {name: np.concatenate(arrays) for name, arrays in columns.items()}


def _shown(
    experiences: Sequence[Experience], indices: Mapping[int, IndexArray], segments: Sequence[Segment]
) -> tuple[Shown, ...]:
    """Return the images of a pack, in the order of their computed tokens."""
    starts = [segment.start for segment in segments]
    found: dict[int, Shown] = {}
    for sequence, experience in enumerate(experiences):
        path = indices[sequence]
        for span in experience.pictures:
            at_T = image_tokens(experience.ids_T, span)
            rows_N = path[at_T[at_T < len(path)]]
            if len(rows_N) and int(rows_N[0]) not in found:
                segment = segments[int(np.searchsorted(starts, rows_N[-1], side="right")) - 1]
                found[int(rows_N[0])] = Shown(picture=span.picture, rows_N=rows_N, stop=segment.subtree_stop)
    return tuple(found[first] for first in sorted(found))


def _routes(experiences: Sequence[Experience], indices: Mapping[int, IndexArray], num_tokens: int) -> dict[str, Any]:
    """Return the fields of a pack about experts: none if a sequence was recorded without."""
    recorded = [experience.routes_NLK for experience in experiences if experience.routes_NLK is not None]
    if len(recorded) < len(experiences):
        return {}
    routes_NLK = np.zeros((num_tokens, *recorded[0].shape[1:]), recorded[0].dtype)
    known_N = np.zeros(num_tokens, np.bool_)
    rerouted, num_rerouted = [], 0
    for sequence, (experience, own_NLK) in enumerate(zip(experiences, recorded, strict=True)):
        path = indices[sequence][: len(_computed_ids(experience))]  # behind them others' tokens may go on
        own_NLK = own_NLK[: len(path)]
        new = ~known_N[path]
        routes_NLK[path[new]], known_N[path] = own_NLK[new], True
        differs = int((routes_NLK[path] != own_NLK).any(axis=(1, 2)).sum())
        num_rerouted += differs
        rerouted.append(np.full(int(experience.loss_mask_T.sum()), differs > 0))
    return {
        "routes_NLK": routes_NLK,
        "rerouted_E": np.concatenate(rerouted),
        "num_rerouted_tokens": num_rerouted,
    }


def _constrained(experiences: Sequence[Experience], masks: TokenMasks | None) -> ConstrainedEntries | None:
    """Return the entries of a pack that have masks, whose entries are in the order of `_entries`."""
    calls, start = [], 0
    for experience in experiences:
        targets = np.flatnonzero(experience.loss_mask_T)
        for index in sorted({*experience.constraints, *experience.supports}):
            at_S = np.flatnonzero(experience.calls_T[targets] == index)
            calls.append(
                ConstrainedCall(
                    constraint=experience.constraints.get(index),
                    supports=experience.supports.get(index),
                    ids_S=experience.ids_T[targets[at_S]],
                    entries_S=start + at_S,
                    where=f"call {index} of rollout {experience.rollout_id}",
                )
            )
        start += len(targets)
    return ConstrainedEntries(calls, masks) if calls else None
