"""What a dataset and a model are, whatever their paths: short digests that a run notes, to know them again.

In: rows, a model's folder. Out: `{"rows": 40, "digest": "..."}`, `{"bytes": 1234, "digest": "..."}`. Both look at no
more than is cheap: up to 1,000 rows at even distances, the small files of a model and pieces of its weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpen.experience.reading import read_task_rows, read_taught
from sharpen.experience.records import row_text
from sharpen.types import Task

Identity = Mapping[str, int | str]
ROWS = 1000
"""Rows that are looked at, the first and the last among them; all of a smaller dataset."""
_PIECES, _PIECE_BYTES = 16, 1 << 16
_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "special_tokens_map.json")
_WEIGHTS = ("*.safetensors", "*.bin")


def rows_identity(rows: Sequence[Task]) -> Identity:
    """How many rows there are, and a digest of them. What has no form in JSON (an image) counts by its type alone."""
    digest = hashlib.blake2b(digest_size=8)
    looked_at = min(ROWS, len(rows))
    for place in range(looked_at):
        row = rows[place * (len(rows) - 1) // max(looked_at - 1, 1)].row
        digest.update(json.dumps(row, default=_foreign, sort_keys=True).encode())
    return {"rows": len(rows), "digest": digest.hexdigest()}


def trained_rows_stay(journal: Path, rows: Sequence[Task]) -> bool:
    """Whether the rows that a run has met so far, by its journal, are all there as they were, whatever became of the
    others (one that could not be read may have been repaired). False if it has met none."""
    from sharpen.supervised.taught import row_digest  # supervised runs are opened through here

    if not journal.exists():
        return False
    met: dict[str, str | bytes] = dict(read_task_rows(journal))
    met |= {row.row_id: row.row_digest for step, some in read_taught(journal).items() if step for row in some}
    now = {row.id: row for row in rows if row.id in met}
    return bool(met) and all(
        id_ in now and known == (row_digest(now[id_]) if isinstance(known, bytes) else row_text(now[id_].row))
        for id_, known in met.items()
    )


def model_identity(folder: Path) -> Identity:
    """The size of a model's weights, and a digest of its configuration, its tokenizer and pieces of its weights."""
    digest, size = hashlib.blake2b(digest_size=8), 0
    for file in sorted({file for pattern in _SMALL_FILES for file in folder.glob(pattern) if file.is_file()}):
        digest.update(file.name.encode() + file.read_bytes())
    for file in sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        length = file.stat().st_size
        size += length
        with file.open("rb") as content:
            for piece in range(_PIECES):
                content.seek(piece * max(length - _PIECE_BYTES, 0) // (_PIECES - 1))
                digest.update(content.read(_PIECE_BYTES))
    return {"bytes": size, "digest": digest.hexdigest()}


def _foreign(value: Any) -> str:
    return hashlib.blake2b(value, digest_size=8).hexdigest() if isinstance(value, bytes) else type(value).__name__
