"""Finds parts that others bring: by `package.module:name` in the settings, or by a name that a package announces.

In: the kind of part (`algorithms`, `monitors`, ...), the name in the settings, and our own parts of the kind. Out: the
part, or a `ConfigError` that names what there is. A package announces a part by an entry point of the group
`sharpen.<kind>`; our own names come first, so that no package replaces one of ours.

A run directory may be a stranger's: while a command reads one (`functions.reading_runs`), the code that its settings
name is not loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from sharpen.config.functions import import_object, may_load, place_of, prepare
from sharpen.errors import ConfigError

_LEFT_BEHIND = {"__pycache__", ".git"}
_MARKS = ("__init__.py", "openenv.yaml")
"""What makes a folder a package, of Python or of OpenEnv."""


def find_part(kind: str, name: str, ours: Mapping[str, Any]) -> Any:
    """Return the part `name` of a kind. A name with a colon is imported, from a module or a file.

    Raises `ConfigError` for a name that nobody has (with the nearest), for one that several packages announce, and for
    code that fails when imported.
    """
    if name in ours:
        return ours[name]
    if ":" in name:
        if not may_load(name):
            raise ConfigError(
                f"the run was made with {name}, code of its author: it is not loaded to read a run. If you trust it, "
                f"`sharpen certify` has --trust {name.rpartition(':')[0]}"
            )
        prepare()
        return import_object(name)
    announced = _announced(kind)
    if name not in announced:
        known = sorted({*ours, *announced})
        near = get_close_matches(name, known, n=1)
        raise ConfigError(
            f"there is no {name!r} among {group(kind)}: there are {', '.join(known)}"
            f"{f'; did you mean {near[0]!r}?' if near else ''} (docs/use/extending.md)"
        )
    (entry, *others) = announced[name]
    if others:
        places = ", ".join(f"{one.value} of {one.dist.name if one.dist else '?'}" for one in (entry, *others))
        raise ConfigError(f"{group(kind)}: several packages announce {name!r} ({places}): name it by module:name")
    try:
        return entry.load()
    except Exception as error:  # the package's code runs
        raise ConfigError(f"{entry.value}, which {group(kind)} announces as {name!r}, fails: {error!r}") from error


@dataclass(frozen=True, slots=True)
class PartName:
    """Validates a setting that names a part, by pydantic and without importing anything: one of `ours`, a name that a
    package announces, or `module:name`."""

    kind: str
    ours: tuple[str, ...]

    def __call__(self, name: str) -> str:
        """Return the name. Raises `ValueError` for one that nobody has, with the nearest."""
        if name in self.ours or ":" in name or name in (announced := _announced(self.kind)):
            return name
        known = [*self.ours, *sorted(announced)]
        near = get_close_matches(name, known, n=1)
        raise ValueError(
            f"must be {_listed(known)} (or a part of your own: docs/use/extending.md), got {name!r}"
            f"{f'; did you mean {near[0]!r}?' if near else ''}"
        )


def _listed(known: Sequence[str]) -> str:
    """Return names as they are listed, or what is named where there are none."""
    if not known:
        return "module:name"
    *most, last = map(repr, known)
    return f"{', '.join(most)} or {last}" if most else last


def names(kind: str, ours: Mapping[str, Any]) -> list[str]:
    """Return the names of a kind of part: ours, then those that packages announce."""
    return [*ours, *sorted(_announced(kind).keys() - ours.keys())]


def place_of_part(kind: str, name: str) -> str:
    """Return where a part is that is not ours, as `module:object`. Raises `ConfigError` as `find_part` does."""
    if ":" not in name:
        find_part(kind, name, {})
        return _announced(kind)[name][0].value
    return name


def source_identity(kind: str, name: str) -> dict[str, int | str]:
    """Return the size and a digest of the file with the source of a part that is not ours, by which a run that goes on
    recognizes it wherever the file is. What that file imports is not in it."""
    find_part(kind, name, {})
    place, _, attributes = place_of_part(kind, name).rpartition(":")
    path = Path(place) if place.endswith(".py") else Path(getattr(sys.modules[place], "__file__", None) or "")
    content = path.read_bytes() if path.is_file() else b""
    return {"bytes": len(content), "digest": blake2b(attributes.encode() + b"\0" + content, digest_size=8).hexdigest()}


def code_identity(name: str) -> dict[str, int | str]:
    """Return a digest of the code behind `module:object` or `path/file.py:object`, without loading it: of all Python
    files of the package that it is in, or of its file if that is in none."""
    place, _ = place_of(name)
    path = Path(place) if place.endswith(".py") else _file_of(place)
    if path is None or not path.is_file():
        return {}
    package = None
    for folder in path.resolve().parents:
        if not any((folder / mark).is_file() for mark in _MARKS):
            break
        package = folder
    if package is not None:
        return {"package": package.name, "digest": folder_digest(package, "*.py")}
    return {"file": path.name, "digest": blake2b(path.read_bytes(), digest_size=8).hexdigest()}


def _file_of(module: str) -> Path | None:
    """Return the file of a module, seen from the current folder too."""
    parts = module.split(".")
    for folder in (Path.cwd(), *map(Path, sys.path)):
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return path
    return None


def folder_digest(folder: Path, pattern: str = "*") -> str:
    """Return a digest of the names and contents of the files below a folder that match a pattern, and of where links
    point, without what Python and git leave behind."""
    digest = blake2b(digest_size=8)
    for path in sorted(folder.rglob(pattern)):
        if _LEFT_BEHIND & set(path.relative_to(folder).parts) or not (path.is_file() or path.is_symlink()):
            continue
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def group(kind: str) -> str:
    """Return the group of entry points of a kind of part."""
    return f"sharpen.{kind}"


def _announced(kind: str) -> Mapping[str, Sequence[EntryPoint]]:
    return _of_kind(kind, tuple(filter(None, map(_change, sys.path))))


def _change(folder: str) -> tuple[str, int] | None:
    """Return a folder with when something was last put into it or taken out; None if it is not there."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return None


@lru_cache(maxsize=32)
def _of_kind(kind: str, places: tuple[tuple[str, int], ...]) -> Mapping[str, Sequence[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in _installed(places).select(group=group(kind)):
        found.setdefault(entry.name, []).append(entry)
    return found


@lru_cache(maxsize=1)
def _installed(_places: tuple[tuple[str, int], ...]) -> Any:
    """Return what all packages announce, as `EntryPoints` or, in Python 3.11, `SelectableGroups`. A run asks often,
    and the metadata of each package is a file: they are read again when a folder of the search path has changed."""
    return entry_points()
