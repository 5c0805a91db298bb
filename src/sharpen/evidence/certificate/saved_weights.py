"""The checkpoints of a run as they are on disk, held against their checksums.

In: a run directory. Out: the checkpoints that can be measured; a sentence for each that is not as it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sharpen.errors import CheckpointError
from sharpen.learning.trainer.checkpoint import PREFIX, Pointer, pointed, step_of
from sharpen.learning.trainer.checksums import CHECKSUMS, changed_weights

_TO_USE: tuple[Pointer, ...] = ("latest", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """The folders of the checkpoints that are as they were written, or have no checksums, by step; a sentence for each
    of the others; and one that names those without checksums."""

    folders: Mapping[int, Path]
    problems: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()


def read_saved_weights(run_dir: Path, *, every: bool) -> SavedWeights:
    """Compare the weights of every checkpoint, or of the latest and the best one only, with their checksums. Each file
    is read once. Raises `CheckpointError` if one cannot be read."""
    folders, problems, unknown = {}, [], []
    for folder in _every(run_dir) if every else _to_use(run_dir):
        try:
            changed = changed_weights(folder)
        except OSError as error:
            raise CheckpointError(f"cannot read the checkpoint {folder}: {error}") from error
        if changed:
            problems.append(
                f"{folder.name} does not hold the weights that were saved: {' and '.join(changed)} changed since. "
                "Restore the folder, or do not use it"
            )
            continue
        if changed is None:
            unknown.append(folder.name)
        folders[step_of(folder)] = folder
    not_compared = (
        f"whether the weights in {', '.join(unknown)} are those that were saved: there is no {CHECKSUMS} to compare "
        "them with",
    )
    return SavedWeights(folders=folders, problems=tuple(problems), not_compared=not_compared if unknown else ())


def _every(run_dir: Path) -> list[Path]:
    found = [path for path in run_dir.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit() and path.is_dir()]
    return sorted(found, key=step_of)


def _to_use(run_dir: Path) -> list[Path]:
    found = (pointed(run_dir, name) for name in _TO_USE)
    return list(dict.fromkeys(folder for folder in found if folder is not None))
