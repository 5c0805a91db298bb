"""Checksums of a checkpoint's weights and state, by which a changed bit is noticed.

In: a checkpoint's folder. Out: `trainer_state/SHA256SUMS`, which `sha256sum --check` reads too (in that folder's
parent); the files that are not as they were written, of all or of those that the weights are made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS = "trainer_state/SHA256SUMS"
_STATE = "trainer_state/"
_OF_WEIGHTS = (f"{_STATE}weights.", f"{_STATE}state.json", CHECKSUMS)
"""How the files of the trainer's state begin that describe the weights; the largest, the optimizer's, do not."""
_THREADS = 4


def write_checksums(directory: Path) -> None:
    """Write the checksums of all tensors and of the trainer's state."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*.safetensors"))
    sums = _sums(directory, [*names, "trainer_state/state.json"])
    (directory / CHECKSUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))


def changed_files(directory: Path) -> list[str]:
    """Return the files that are missing or not as they were written; none for a checkpoint without checksums, of an
    earlier version. Reads all of them. Raises `OSError` if one cannot be read."""
    written = _written(directory)
    there = [name for name in written if (directory / name).is_file()]
    found = _sums(directory, there)
    return [name for name, digest in written.items() if found.get(name) != digest]


def changed_weights(directory: Path) -> list[str] | None:
    """Return the files of a checkpoint's weights and state that are not as they were written: changed, missing, or
    added. Those in `trainer_state/` may be missing. None for a checkpoint without checksums. Reads nothing else. Raises
    `OSError` if one cannot be read."""
    if not (directory / CHECKSUMS).exists():
        return None
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*.safetensors")}
    written = _written(directory)
    weights = {name for name in {*there, *written} if not name.startswith(_STATE)}
    weights.update(name for name in written if name.startswith(_OF_WEIGHTS) and (directory / name).is_file())
    found = _sums(directory, [name for name in sorted(weights) if (directory / name).is_file()])
    return [name for name in sorted(weights) if name not in found or found[name] != written.get(name)]


def _written(directory: Path) -> dict[str, str]:
    """Return the recorded checksum of each file. An empty file, or a line that is none, counts as a changed file."""
    try:
        lines = (directory / CHECKSUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    pairs = [line.partition("  ") for line in lines or [""]]
    return {name or CHECKSUMS: digest for digest, _, name in pairs}


def _sums(directory: Path, names: Iterable[str]) -> Mapping[str, str]:
    """Return the SHA-256 of files, some at a time: each is read by a thread of its own."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _sum(directory / name), names), strict=True))


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
