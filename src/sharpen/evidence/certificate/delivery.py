"""Describe what the trainer receives in a step, in the form that is checked, stored and checked again offline.

In: the batches of a step, one for each update. Out: a `Delivery`: for each call that carries loss, the positions and
weights of its tokens and digests of its ids (with its pictures) and records; and what happened to each group.

Shape suffixes: T tokens of a sequence, S loss tokens of a call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from sharpen.learning.experience.records import Delivery, GroupPlace, LossSpan
from sharpen.types import Call, Constraint, Experience, PictureSpan, Supports

_DIGEST_BYTES = 16


class UpdateDelivery(Protocol):
    """The attributes of a batch that are checked."""

    @property
    def experiences(self) -> Sequence[Experience]:
        """The sequences of the update."""

    @property
    def group_ids(self) -> Sequence[str]:
        """The ids of the groups that train."""

    @property
    def left_out(self) -> Mapping[str, Any]:
        """Why the other groups do not train, by group id."""


def delivery(updates: Sequence[UpdateDelivery], replayed: Collection[str] = ()) -> Delivery:
    """Return what these updates pass to the trainer; `replayed` holds the ids of replayed groups."""
    spans: list[LossSpan] = []
    places: list[GroupPlace] = []
    sequence = 0
    for number, update in enumerate(updates):
        for experience in update.experiences:
            spans += _spans(experience, number, sequence)
            sequence += 1
        trained = [(id_, None) for id_ in update.group_ids]
        left_out = [(id_, str(reason)) for id_, reason in update.left_out.items()]
        places += [
            GroupPlace(group_id=id_, update=number, left_out=reason, replayed=id_ in replayed)
            for id_, reason in (*trained, *left_out)
        ]
    return Delivery(spans=tuple(spans), places=tuple(places))


def _spans(experience: Experience, update: int, sequence: int) -> Iterator[LossSpan]:
    """Yield each call that carries loss in the sequence, in the order of their first tokens."""
    places_T = np.flatnonzero(experience.loss_mask_T)
    calls = experience.calls_T[places_T]
    ordered = sorted((int(places_T[calls == call][0]), int(call)) for call in np.unique(calls))
    ids, until = blake2b(digest_size=_DIGEST_BYTES), 0
    for _, call in ordered:
        at_S = places_T[calls == call] if len(ordered) > 1 else places_T
        last = int(at_S[-1]) + 1
        shown = [span for span in experience.pictures if span.start < last]
        if last > until:
            ids.update(_bytes(experience.ids_T[until:last], "<i4"))
            until, digest = last, _with_pictures(ids.copy(), shown)
        else:
            digest = ids_digest(experience.ids_T[:last], pictures=shown)
        yield LossSpan(
            update=update,
            sequence=sequence,
            group_id=experience.group_id,
            rollout_id=experience.rollout_id,
            call=call,
            places_S=at_S.astype(np.int32),
            advantages_S=experience.advantages_T[at_S],
            weights_S=experience.weights_T[at_S],
            ids=digest,
            records=records_digest(
                experience.logprobs_T[at_S],
                experience.versions_T[at_S],
                experience.temperatures_T[at_S],
                experience.constraints.get(call),
                None if experience.routes_NLK is None else experience.routes_NLK[at_S - 1],
                experience.supports.get(call),
                None if experience.taught_T is None else experience.taught_T[at_S],
            ),
            source=experience,
        )


def ids_digest(*ids: np.ndarray, pictures: Iterable[PictureSpan] = ()) -> bytes:
    """Return a digest of token ids, concatenated, and of the pictures that they stand for: the image tokens of all
    pictures have one id."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in ids:
        digest.update(_bytes(part, "<i4"))
    return _with_pictures(digest, pictures)


def _with_pictures(digest: blake2b, pictures: Iterable[PictureSpan]) -> bytes:
    for span in pictures:
        digest.update(f"{span.picture.sha256} {span.start} {span.length}\n".encode())
    return digest.digest()


def records_digest(
    logprobs_S: np.ndarray,
    versions_S: np.ndarray,
    temperatures_S: np.ndarray,
    constraint: Constraint | None = None,
    routes_SLK: np.ndarray | None = None,
    supports: Supports | None = None,
    taught_S: np.ndarray | None = None,
) -> bytes:
    """Return a digest of what was recorded with each sampled token, of the constraint that they were sampled under, of
    the experts of the tokens before them, which predict them, of their supports, and of what a teacher's endpoint said
    of them."""
    digest = blake2b(_bytes(logprobs_S, "<f4"), digest_size=_DIGEST_BYTES)
    digest.update(_bytes(versions_S, "<i4"))
    digest.update(_bytes(temperatures_S, "<f4"))
    if constraint is not None:
        digest.update(constraint.grammar.encode())
    if routes_SLK is not None:
        digest.update(routes_SLK.tobytes())
    if supports is not None:
        digest.update(_bytes(supports.sizes_S, "<i4") + supports.packed)
    if taught_S is not None:
        digest.update(_bytes(taught_S, "<f4"))
    return digest.digest()


def recorded_digest(call: Call) -> bytes:
    """Return the `records_digest` of a call as it was recorded."""
    count = len(call.sampled_ids_S)
    temperatures_S = np.full(count, call.sampling.temperature, np.float32)
    routes_SLK = None if call.routes_NLK is None else call.routes_NLK[len(call.prompt_ids_P) - 1 :]
    return records_digest(
        call.logprobs_S,
        call.versions_S,
        temperatures_S,
        call.constraint,
        routes_SLK,
        call.supports,
        call.taught_S,
    )


def _bytes(numbers: np.ndarray, dtype: str) -> bytes:
    return np.asarray(numbers, dtype).tobytes()
