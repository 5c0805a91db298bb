"""The checkpoints of a run as they are on disk, held against their checksums.

In: a run directory. Out: those that are as they were written; a sentence for each of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sharpen.errors import CheckpointError
from sharpen.trainer.checkpoint import PREFIX, Pointer, pointed, step_of
from sharpen.trainer.checksums import changed_files

_TO_USE: tuple[Pointer, ...] = ("latest", "best")


def changed_weights(run_dir: Path) -> Iterator[str]:
    """Yield a sentence for each checkpoint to use, the latest and the best one, that has changed since it was
    written. Raises `CheckpointError` if one cannot be read."""
    for folder in dict.fromkeys(pointed(run_dir, name) for name in _TO_USE):
        if folder is not None and (changed := _changed(folder)):
            yield f"{folder.name} does not hold the weights that were saved: {changed} changed since"


def unchanged_checkpoints(run_dir: Path, missing: list[str]) -> dict[int, Path]:
    """Return the folders of the checkpoints that are as they were written, by step; add a sentence to `missing` for
    each of the others. Raises `CheckpointError` if one cannot be read."""
    whole = {}
    for folder in sorted(run_dir.glob(f"{PREFIX}*"), key=step_of):
        if changed := _changed(folder):
            missing.append(f"what the weights in {folder.name} compute: {changed} changed since they were saved")
        else:
            whole[step_of(folder)] = folder
    return whole


def _changed(folder: Path) -> str:
    """Return the changed files of a checkpoint. Files that are gone (the optimizer's are large) say nothing against
    the weights."""
    try:
        return " and ".join(name for name in changed_files(folder) if (folder / name).is_file())
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error}") from error
