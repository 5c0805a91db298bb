"""The folder of one command: filled before, compared after, removed at the end.

In: a folder to copy, files to write. Out: `Folder`, and `Changes`: what the command created, modified and deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sharpen.errors import CommandError

Stamp = tuple[int, int, int]
"""(time of change in ns, size, mode) of a file. The time of change, unlike that of modification, cannot be set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Regular files by path below the folder, sorted. What is behind a link is not followed."""

    created: tuple[str, ...]
    modified: tuple[str, ...]
    deleted: tuple[str, ...]


class Folder:
    """A new folder `root`, of this user alone, with `work` (the command starts there) and `home` (with `tmp`)."""

    def __init__(self, copy: Path | None, files: Mapping[str, str | bytes]) -> None:
        """Raises `CommandError` if `copy` is no folder, or a file's path is not below the folder."""
        if copy is not None and not copy.is_dir():
            raise CommandError(f"folder={str(copy)!r}: there is no such folder")
        self.root = Path(tempfile.mkdtemp(prefix="sharpen-command-"))
        self.work, self.home = self.root / "work", self.root / "home"
        try:
            (self.home / "tmp").mkdir(parents=True)
            if copy is None:
                self.work.mkdir()
            else:
                shutil.copytree(copy, self.work, symlinks=True)
            for name, content in files.items():
                self._write(name, content)
        except BaseException:
            self.remove()
            raise
        self._before = _stamps(self.work)

    def _write(self, name: str, content: str | bytes) -> None:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise CommandError(f"files[{name!r}]: the path must be below the command's folder, like 'src/a.txt'")
        place = self.work / path
        if not place.parent.resolve().is_relative_to(self.work.resolve()) or place.is_symlink() or place.is_dir():
            raise CommandError(f"files[{name!r}]: a link or a folder of the copied folder is in the way")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)

    def changes(self) -> Changes:
        """Compare with the beginning."""
        after = _stamps(self.work)
        before = self._before
        return Changes(
            created=tuple(sorted(after.keys() - before.keys())),
            modified=tuple(sorted(name for name in after.keys() & before.keys() if after[name] != before[name])),
            deleted=tuple(sorted(before.keys() - after.keys())),
        )

    def remove(self) -> None:
        """Remove it, also what the command has protected against that."""
        shutil.rmtree(self.root, ignore_errors=True)
        if self.root.exists():
            for place, _, _ in os.walk(self.root):
                with contextlib.suppress(OSError):
                    os.chmod(place, 0o700)
            shutil.rmtree(self.root, ignore_errors=True)


def _stamps(folder: Path) -> dict[str, Stamp]:
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found[path.relative_to(folder).as_posix()] = (status.st_ctime_ns, status.st_size, status.st_mode)
    return found
