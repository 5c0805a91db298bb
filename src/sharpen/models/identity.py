"""The identity of a model: a digest by which a run recognizes it at any path.

In: a model's folder. Out: `{"bytes": 1234, "digest": "..."}`. To stay cheap it covers small files and pieces of the
weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

Identity = Mapping[str, int | str]
_PIECES, _PIECE_BYTES = 16, 1 << 16
_SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "chat_template*", "special_tokens_map.json"),
    "*processor_config.json",  # of images
)
_WEIGHTS = ("*.safetensors", "*.bin")


def model_identity(folder: Path) -> Identity:
    """Return the size of a model's weights, and a digest of its configuration, tokenizer and pieces of its weights."""
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
