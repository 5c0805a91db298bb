"""What the trainer receives in a step, as it is checked, stored and checked again.

In: the batches of a step, one for each update. Out: a `Delivery`: for each call that carries loss where its tokens
stand, what they weigh, and digests of ids and records; and what became of each group.

Shape suffixes: T tokens of a sequence, S loss tokens of a call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from sharpen.experience.records import Delivery, GroupPlace, LossSpan
from sharpen.types import Call, Experience

_DIGEST_BYTES = 16


class UpdateDelivery(Protocol):
    """The side of a batch that is looked at."""

    @property
    def experiences(self) -> Sequence[Experience]:
        """The sequences of the update."""

    @property
    def group_ids(self) -> Sequence[str]:
        """The groups that train."""

    @property
    def left_out(self) -> Mapping[str, Any]:
        """Why others do not, by their ids."""


def delivery(updates: Sequence[UpdateDelivery], replayed: Collection[str] = ()) -> Delivery:
    """What these updates hand to the trainer; `replayed` are the ids of groups that train again."""
    spans: list[LossSpan] = []
    places: list[GroupPlace] = []
    sequence = 0
    for number, update in enumerate(updates):
        for experience in update.experiences:
            spans += _spans(experience, number, sequence)
            sequence += 1
        of_update = [(id_, None) for id_ in update.group_ids] + [
            (id_, str(why)) for id_, why in update.left_out.items()
        ]
        places += [
            GroupPlace(group_id=id_, update=number, left_out=why, replayed=id_ in replayed) for id_, why in of_update
        ]
    return Delivery(spans=tuple(spans), places=tuple(places))


def _spans(experience: Experience, update: int, sequence: int) -> Iterator[LossSpan]:
    """Each call that carries loss in the sequence, in the order of their first tokens."""
    places_T = np.flatnonzero(experience.loss_mask_T)
    calls = experience.calls_T[places_T]
    found = sorted((int(places_T[calls == call][0]), int(call)) for call in np.unique(calls))
    ids, until = blake2b(digest_size=_DIGEST_BYTES), 0
    for _, call in found:
        at_S = places_T[calls == call] if len(found) > 1 else places_T
        last = int(at_S[-1]) + 1
        if last > until:
            ids.update(_bytes(experience.ids_T[until:last], "<i4"))
            until, digest = last, ids.copy().digest()
        else:
            digest = ids_digest(experience.ids_T[:last])
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
                experience.logprobs_T[at_S], experience.versions_T[at_S], experience.temperatures_T[at_S]
            ),
            source=experience,
        )


def ids_digest(*ids: np.ndarray) -> bytes:
    """Of token ids, one after the other."""
    found = blake2b(digest_size=_DIGEST_BYTES)
    for part in ids:
        found.update(_bytes(part, "<i4"))
    return found.digest()


def records_digest(logprobs_S: np.ndarray, versions_S: np.ndarray, temperatures_S: np.ndarray) -> bytes:
    """Of what was recorded with each sampled token."""
    found = blake2b(_bytes(logprobs_S, "<f4"), digest_size=_DIGEST_BYTES)
    found.update(_bytes(versions_S, "<i4"))
    found.update(_bytes(temperatures_S, "<f4"))
    return found.digest()


def recorded_digest(call: Call) -> bytes:
    """`records_digest` of a call as it was recorded."""
    count = len(call.sampled_ids_S)
    return records_digest(call.logprobs_S, call.versions_S, np.full(count, call.sampling.temperature, np.float32))


def _bytes(numbers: np.ndarray, dtype: str) -> bytes:
    return np.asarray(numbers, dtype).tobytes()
