"""Makes the journal's record of a trained row, with digests that show whether dataset and sequences have changed.

In: a row and its lesson. Out: a `TaughtRow`.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from sharpen.learning.experience.images import stand_in
from sharpen.learning.experience.records import TaughtRow
from sharpen.learning.supervised.lessons import Lesson
from sharpen.types import Task

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
