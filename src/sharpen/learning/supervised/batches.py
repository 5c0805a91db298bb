"""Makes the batch of an update from lessons: splits them into updates and sets the weights of tokens.

In: lessons, an algorithm. Out: experiences with weights that are normalized over the whole update, so that splitting
into micro-batches does not change the gradient.

Shape suffixes: T tokens of all sequences, concatenated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from sharpen.learning.algorithm.aggregation import token_weights
from sharpen.learning.algorithm.supervised import SupervisedAlgorithm
from sharpen.learning.experience.images import stand_in
from sharpen.learning.experience.records import TaughtRow
from sharpen.learning.supervised.lessons import Lesson
from sharpen.types import Experience, Task


def split(lessons: Sequence[Lesson], num_parts: int) -> list[Sequence[Lesson]]:
    """Split lessons into up to `num_parts` parts of nearly equal size, none of them empty."""
    bounds = [len(lessons) * part // num_parts for part in range(num_parts + 1)]
    parts = [lessons[start:stop] for start, stop in pairwise(bounds)]
    return [part for part in parts if part]


def weighted(lessons: Sequence[Lesson], algorithm: SupervisedAlgorithm) -> tuple[Experience, ...]:
    """Return the sequences of one update's lessons, with token weights."""
    numbered = [(number, one) for number, lesson in enumerate(lessons) for one in lesson.experiences]
    if not numbered:
        return ()
    lengths = [len(experience.ids_T) for _, experience in numbered]
    mask_T = np.concatenate([experience.loss_mask_T for _, experience in numbered])
    calls_T = np.concatenate([experience.calls_T for _, experience in numbered]).astype(np.int64)
    rollouts_T = np.repeat([number for number, _ in numbered], lengths)
    # Turns of different rows, and of the two sides of a pair, get different numbers.
    sides_T = np.concatenate([experience.advantages_T < 0 for _, experience in numbered])
    calls_T = (rollouts_T * 2 + sides_T) * (int(calls_T.max()) + 1) + calls_T
    weights_T = np.zeros(len(mask_T), np.float32)
    weights_T[mask_T] = token_weights(
        algorithm.aggregation, rollouts_T[mask_T], calls_T[mask_T], length=algorithm.constant_length
    )
    parts = np.split(weights_T, np.cumsum(lengths)[:-1])
    return tuple(replace(one, weights_T=part) for (_, one), part in zip(numbered, parts, strict=True))


# Makes the journal's record of a trained row, with digests that show whether dataset and sequences have changed.
#
# In: a row and its lesson. Out: a `TaughtRow`.

HELD_OUT = 0
"""The step number under which held-out rows are recorded."""


def row_digest(row: Task) -> bytes:
    """Return a digest (16 bytes) of a row's content."""
    content = json.dumps(row.row, sort_keys=True, default=stand_in)
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def held_out_row(row: Task) -> TaughtRow:
    """Make the record of a row that is not trained on: only the digest of its content."""
    return TaughtRow(row_id=row.id, num_tokens=0, too_long=False, row_digest=row_digest(row), ids_digest=b"")


def taught_row(row: Task, lesson: Lesson) -> TaughtRow:
    """Make the record of a trained row. `ids_digest` covers the ids of its sequences, and for each id whether it
    carries loss and on which side of a pair; and the images, whose tokens have one id."""
    sequences = hashlib.blake2b(digest_size=16)
    for experience in lesson.experiences:
        sequences.update(np.int64(len(experience.ids_T)).tobytes())
        sequences.update(experience.ids_T.astype("<i4").tobytes())
        sequences.update(
            np.where(experience.loss_mask_T, np.sign(experience.advantages_T), 0).astype(np.int8).tobytes()
        )
        for span in experience.pictures:
            sequences.update(f"{span.picture.sha256} {span.start} {span.length}\n".encode())
    return TaughtRow(
        row_id=lesson.id,
        num_tokens=sum(int(np.count_nonzero(experience.loss_mask_T)) for experience in lesson.experiences),
        too_long=lesson.too_long,
        row_digest=row_digest(row),
        ids_digest=sequences.digest(),
    )
