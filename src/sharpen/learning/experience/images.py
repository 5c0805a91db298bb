"""The images of a journal: files beside it, one for one content, named by the content's hash.

In: the pictures of calls. Out: `images/<sha256>`, whole on disk before a call that names it is written, so that a crash
leaves at most a file that no call names; and pictures whose content is read when it is first needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sharpen.files import flush_folder, partial_files, write_whole
from sharpen.types import Call, Group, Picture

FOLDER = "images"
_ABANDONED_S = 3600.0
"""Age of an unfinished file that nobody finishes."""
TABLE = "CREATE TABLE IF NOT EXISTS images (sha256 TEXT PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID"


class ImageFolder:
    """The folder of the images of a journal at `journal`, made with the first one."""

    def __init__(self, journal: Path) -> None:
        self.path = journal.parent / FOLDER
        self._written: set[str] = set()

    def add(self, pictures: Iterable[Picture]) -> None:
        """Write the images that are not there. Raises `OSError`."""
        new = {one.sha256: one for one in pictures if one.sha256 not in self._written}
        missing = [one for one in new.values() if not (self.path / one.sha256).exists()]
        if missing:
            self.path.mkdir(exist_ok=True)
            if not self._written:
                self._sweep()
            for picture in missing:
                write_whole(self.path / picture.sha256, picture.data)
            if not self._written:
                flush_folder(self.path.parent)
        self._written.update(new)

    def _sweep(self) -> None:
        """Remove what processes left that were killed amid a file; another one may be writing at this moment."""
        for leftover in partial_files(self.path):
            with contextlib.suppress(OSError):
                if leftover.stat().st_mtime < time.time() - _ABANDONED_S:
                    leftover.unlink()

    def picture(self, sha256: str) -> Picture:
        """Return the picture with this hash; nothing is read yet. Raises `ValueError` for what is no hash."""
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"{sha256[:80]!r} is not the hash of an image")
        return Picture(sha256=sha256, path=self.path / sha256)


def with_data(message: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """Return a recorded message of a call with its images as data URLs, as the agent sent them."""
    content = message.get("content")
    if not call.pictures or not isinstance(content, list | tuple):
        return dict(message)
    pictures = {f"sha256:{span.picture.sha256}": span.picture for span in call.pictures}

    def whole(part: Any) -> Any:
        source = part.get("image_url") if isinstance(part, Mapping) else None
        if not isinstance(source, Mapping) or (picture := pictures.get(str(source.get("url")))) is None:
            return part
        return {**part, "image_url": {**source, "url": picture.data_url}}

    return {**message, "content": [whole(part) for part in content]}


def stand_in(value: Any) -> str:
    """Return a text for a value that JSON cannot hold, the same whenever the row is read: of an image (Pillow's) its
    size and the hash of its pixels, of anything else its `repr`."""
    if not (hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size")):
        return repr(value)
    width, height = value.size
    return f"image {width}x{height} {value.mode} {hashlib.sha256(value.tobytes()).hexdigest()}"


def insert_images(connection: sqlite3.Connection, pictures: Iterable[Picture]) -> None:
    """Write images into a journal that is no file, and so has no folder."""
    connection.execute(TABLE)
    for picture in {one.sha256: one for one in pictures}.values():
        connection.execute("INSERT OR IGNORE INTO images VALUES (?, ?)", (picture.sha256, picture.data))


def read_image(connection: sqlite3.Connection, sha256: str) -> Picture:
    """Return an image that `insert_images` wrote."""
    (content,) = connection.execute("SELECT content FROM images WHERE sha256 = ?", (sha256,)).fetchone()
    return Picture(sha256=sha256, content=content)


def pictures_of(group: Group) -> list[Picture]:
    """Return the pictures of a group's calls, each as often as it is shown."""
    rollouts = (*group.with_baseline, *group.attempts)
    return [span.picture for rollout in rollouts for call in rollout.calls for span in call.pictures]
