"""Files that others read: whole, or not there at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file that others see whole or not at all, and that is on disk when this returns. Text is written in
    UTF-8. Several writers may write the same file at once: it is one of theirs in the end. A device or a pipe, which
    cannot be replaced, is written to. Raises `OSError`."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
