"""What the journal keeps of a row that was taught: enough to tell whether dataset and sequences are still the same.

In: a row and its lesson. Out: a `TaughtRow`.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from sharpen.experience.records import TaughtRow
from sharpen.supervised.lessons import Lesson
from sharpen.types import Task

HELD_OUT = 0
"""The step under which the rows are kept whose loss is measured only."""


def row_digest(row: Task) -> bytes:
    """16 bytes that tell the row's content from any other."""
    content = json.dumps(row.row, sort_keys=True, default=repr)
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def held_out_row(row: Task) -> TaughtRow:
    """A row that is not trained on: nothing but its content is kept in mind."""
    return TaughtRow(row_id=row.id, num_tokens=0, too_long=False, row_digest=row_digest(row), ids_digest=b"")


def taught_row(row: Task, lesson: Lesson) -> TaughtRow:
    """The row with its digests (16 bytes each): of its content; of the ids of its sequences, and which of them
    are taught, on which side."""
    sequences = hashlib.blake2b(digest_size=16)
    for experience in lesson.experiences:
        sequences.update(np.int64(len(experience.ids_T)).tobytes())
        sequences.update(experience.ids_T.astype("<i4").tobytes())
        sequences.update(
            np.where(experience.loss_mask_T, np.sign(experience.advantages_T), 0).astype(np.int8).tobytes()
        )
    return TaughtRow(
        row_id=lesson.id,
        num_tokens=sum(int(np.count_nonzero(experience.loss_mask_T)) for experience in lesson.experiences),
        too_long=lesson.too_long,
        row_digest=row_digest(row),
        ids_digest=sequences.digest(),
    )
