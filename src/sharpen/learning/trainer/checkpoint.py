"""Checkpoints: Hugging Face directories that transformers and vLLM can load, plus `trainer_state/` for resume.

In: a model, optimizer tensors and a JSON state. Out: `global_step_N/` in the run directory, written completely or not
at all, with `latest` and `best` pointing to one of them. Weights are stored in the compute dtype of the run, since
that is the model that was evaluated; if it is not fp32, the fp32 master weights are in `trainer_state/`. A run with
adapters stores the merged model, `adapter/` in peft's format, and the adapters in `trainer_state/`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from sharpen.config.resuming import ANOTHER_NAME
from sharpen.errors import CheckpointError, ModelError
from sharpen.files import give_mode_of_new, partial_files, write_whole
from sharpen.learning.trainer.checksums import changed_files, write_checksums

if TYPE_CHECKING:
    import torch

    from sharpen.learning.trainer.model import TrainedModel
    from sharpen.learning.trainer.team import Team

Pointer = Literal["latest", "best"]
PREFIX = "global_step_"
STATE = "trainer_state"
ADAPTERS = "adapters"
START = "adapters_at_start.safetensors"
"""The file of a run directory that holds the adapters before the first update, which begin at random."""
_MODEL = "model"
_NO_FOLDER = "which is no folder of this run"
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_OWN_FILES = ("weights", "optimizer", "random")
PART_BYTES = 4 << 30
"""The size of a file of the trainer's state: several are read and hashed at the same time. Of more than one, the second
is `optimizer.2.safetensors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The content of a checkpoint that a resume needs. `weights` are the fp32 master weights (or adapters) by name;
    `further` are the additional tensors passed to `save`, under the same names."""

    weights: Mapping[str, torch.Tensor]
    optimizer_tensors: Mapping[str, torch.Tensor]
    random_state: Mapping[str, torch.Tensor]
    state: dict[str, Any]
    further: Mapping[str, Mapping[str, torch.Tensor]]


class _TensorFiles(Mapping[str, "torch.Tensor"]):
    """The tensors of some files, each read when it is accessed, so that no rank has to hold all of them."""

    def __init__(self, *files: Path) -> None:
        """Open the files. Raises `OSError` or `SafetensorError` if one is missing or damaged."""
        opened: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (not a mapping)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def save(
    directory: Path,
    *,
    policy: TrainedModel,
    optimizer_tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    further: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    team: Team,
) -> None:
    """Write a checkpoint at `directory`, replacing an existing one. `state` must be JSON; `further` are additional
    tensors by file name (a critic's, for example), which must not be "weights", "optimizer" or "random". Every rank of
    the team calls this; the first one writes, and if it fails, all raise.

    Tokenizer, chat template and generation config are copied from the local directory that `policy` was loaded from.
    Raises `CheckpointError`, for example if the disk is full; then whatever was at `directory` is unchanged and no
    partial files remain.
    """
    pieces = _pieces(policy, {"optimizer": optimizer_tensors, **(further or {})}, team)

    def write(partial: Path) -> None:
        from safetensors.torch import save_file

        inner = partial / STATE
        inner.mkdir()
        for name, group in groupby(pieces, key=itemgetter(0)):
            if name == _MODEL:
                policy.write(partial, map(itemgetter(1), group))
                _copy_unchanged(Path(policy.module.config._name_or_path), partial)
                continue
            ((_, tensors),) = group
            if name == "weights":
                policy.write_trained(partial, tensors)
            for number, part in enumerate(parts(tensors), 1):
                save_file(_on_cpu(part), inner / f"{name}{'' if number == 1 else f'.{number}'}.safetensors")
        save_file(_random_state(), inner / "random.safetensors")
        full_state = dict(state) if policy.adapters is None else {**state, ADAPTERS: policy.adapters}
        (inner / "state.json").write_text(json.dumps(full_state, indent=2) + "\n")
        write_checksums(partial)

    failure = None
    if team.rank == 0:
        try:
            write_directory(directory, write)
        except CheckpointError as error:
            failure = error
    for _ in pieces:  # a rank that does not write, or failed, must still take part in gathering
        pass
    team.agree(failure)


def save_start(run_dir: Path, policy: TrainedModel, team: Team) -> None:
    """Write the adapters as they are before the first update into a run directory; nothing if all weights train. Every
    rank of the team calls this. Raises `CheckpointError` if the first one cannot write."""
    if policy.adapters is None:
        return
    adapters, failure = team.gather(policy.parameters()), None
    if team.rank == 0:
        from safetensors.torch import save

        try:
            write_whole(run_dir / START, save(_on_cpu(adapters)))
        except OSError as error:
            failure = CheckpointError(f"could not write the adapters before training: {error}")
    team.agree(failure)


def _pieces(
    policy: TrainedModel, further: Mapping[str, Mapping[str, torch.Tensor]], team: Team
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the tensors of a checkpoint file by file, gathering each file only when it is its turn; those of the model
    a part at a time."""
    import torch

    for part in policy.checkpoint_parts():
        yield _MODEL, _emptied(part, team)
    if policy.compute_dtype != torch.float32 or policy.adapters is not None or policy.file_names_differ:
        yield "weights", team.gather(policy.parameters())
    for name, tensors in further.items():
        yield name, team.gather(tensors.items())


def _emptied(part: dict[str, torch.Tensor], team: Team) -> dict[str, torch.Tensor]:
    """Gather a part of a model, and let go of it, so that it is in memory until it is written and no longer."""
    gathered = team.gather(part.items())
    part.clear()
    return gathered


def load(directory: Path) -> SavedState:
    """Open a checkpoint. Raises `CheckpointError` if a file is missing or cannot be read."""
    inner = directory / STATE
    try:
        found = {name: [inner / f"{name}.safetensors"] for name in ("optimizer", "random")}
        for file in set(inner.glob("*.safetensors")) - {file for (file,) in found.values()}:
            found.setdefault(file.stem.partition(".")[0], []).append(file)
        return SavedState(
            weights=_TensorFiles(*(found.get("weights") or sorted(directory.glob("*.safetensors")))),
            optimizer_tensors=_TensorFiles(*found["optimizer"]),
            random_state=_TensorFiles(*found["random"]),
            state=json.loads((inner / "state.json").read_text()),
            further={name: _TensorFiles(*files) for name, files in found.items() if name not in _OWN_FILES},
        )
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot resume from {directory}: {error}") from error


def restore_policy(policy: TrainedModel, saved: SavedState, directory: Path) -> None:
    """Load the weights of the checkpoint in `directory` into a model.

    Raises `CheckpointError`, changing nothing, if the checkpoint is of another model or has other adapters.
    """
    if (before := saved.state.get(ADAPTERS)) != policy.adapters:
        raise CheckpointError(
            f"{directory} was written by a run that trained {_describe_adapters(before)}, but trainer.lora now asks "
            f"for {_describe_adapters(policy.adapters)}: set trainer.lora as it was, or start a new run"
        )
    copy_into(dict(policy.parameters()), saved.weights, directory)


def _describe_adapters(adapters: Mapping[str, Any] | None) -> str:
    if adapters is None:
        return "all weights"
    return f"adapters ({', '.join(f'{name} {value}' for name, value in adapters.items())})"


def copy_into(parameters: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Copy weights into the parameters of the same names.

    Raises `CheckpointError`, changing nothing, if one is missing or has another shape.
    """
    import torch

    from sharpen.learning.trainer.sharding import shard_like

    for name, parameter in parameters.items():
        shape = tuple(weights[name].shape) if name in weights else "nothing"
        if shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{directory} is not a checkpoint of this model: {name} should have shape {tuple(parameter.shape)}, "
                f"found {shape}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard_like(weights[name], parameter))


def set_random_state(random_state: Mapping[str, torch.Tensor]) -> None:
    """Set torch's random generators to a saved state."""
    import torch

    torch.set_rng_state(random_state["cpu"])
    if "cuda" in random_state and torch.cuda.is_available():
        torch.cuda.set_rng_state(random_state["cuda"])


def step_directory(root: Path, step: int) -> Path:
    """Return the path of the checkpoint after this step."""
    return root / f"{PREFIX}{step}"


def step_of(directory: Path) -> int:
    """Return the step in a checkpoint's name, or 0 if the name is not that of a checkpoint."""
    number = directory.name.removeprefix(PREFIX)
    return int(number) if number.isdigit() else 0


def write_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling directory, flush it to disk, and rename it to `directory`.

    Raises `CheckpointError` if writing fails; then, and on interruption, the sibling is removed and whatever was at
    `directory` is unchanged. `repair` cleans up after a kill.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed while writing
        _remove(replaced, ignore_errors=True)
        partial.mkdir()
        write(partial)
        give_mode_of_new(partial)
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        if os.path.lexists(directory):
            directory.rename(replaced)
        partial.rename(directory)
        _flush(directory.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if os.path.lexists(replaced) and not os.path.lexists(directory):
            replaced.rename(directory)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        raise CheckpointError(
            f"could not write the checkpoint {directory}: {error}. Earlier checkpoints are unchanged"
        ) from error
    _remove(replaced, ignore_errors=True)


def _remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory, or a file, or of a link the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)


def point(root: Path, name: Pointer, target: Path) -> None:
    """Point `root/name` to a directory in `root`, atomically, and flush it to disk. The pointer is a symbolic link or,
    if the file system has none, a file that contains the directory's name."""
    partial = root / f".{name}.partial"
    partial.unlink(missing_ok=True)
    try:
        partial.symlink_to(target.name, target_is_directory=True)
    except (OSError, NotImplementedError):  # a file system or user without symbolic links
        partial.write_text(target.name + "\n")
        _flush(partial)
    partial.replace(root / name)
    _flush(root)


def pointed(root: Path, name: Pointer) -> Path | None:
    """Return the checkpoint that `root/name` points to, or None if there is no pointer or no such directory in `root`.
    A checkpoint may be a link to a directory elsewhere. Raises `CheckpointError` if that cannot be told now."""
    found, target = None, _pointer_name(root, name)
    at = None if not target else root / target
    while at is not None and _is(at, stat.S_ISDIR) and at.name != ".." and at.parent.resolve() == root.resolve():
        found = root / at.name
        at = root / os.readlink(found) if found.is_symlink() else None
    return found


def _pointer_name(root: Path, name: Pointer) -> str | None:
    """Return the name that `root/name` points to, whether it exists or not; None if there is no pointer."""
    pointer = root / name
    if pointer.is_symlink():
        return os.readlink(pointer)
    return pointer.read_text().strip() if pointer.is_file() else None


def _is(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether there is a file of this kind. Raises `CheckpointError` if the file system does not say: what cannot be
    read now may be there later."""
    try:
        return kind(path.stat().st_mode)
    except ValueError:  # no name of a file
        return False
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{error.filename or path} cannot be read now ({error.strerror}). That is no damage: try again when it can be"
    )


def prune(root: Path, keep: int) -> list[Path]:
    """Remove all checkpoints except the best, the latest and the `keep` newest others. Return the removed ones."""
    kept = {pointed(root, "latest"), pointed(root, "best")}
    steps = _steps(root)
    others = sorted((path for path in steps if path not in kept), key=steps.__getitem__, reverse=True)
    for path in others[keep:]:
        removed = path.with_name(
            f".{path.name}.removed"
        )  # so that a half-removed directory does not look like a checkpoint
        path.rename(removed)
        _remove(removed)
    return others[keep:]


def repair(root: Path) -> list[str]:
    """Repair the checkpoints in `root` after a kill or a manual change. Return a sentence for each repair.

    Afterwards `latest` and `best` are absent or point to existing checkpoints, and a run can resume from `latest`.
    Raises `CheckpointError` if there are checkpoints, but none is complete.
    """
    notes = [_finish_replacing(replaced) for replaced in sorted(root.glob(f".{PREFIX}*.replaced"))]
    for leftover in (*partial_files(root), *root.glob(f".{PREFIX}*.removed")):
        _remove(leftover)
    if _pointer_name(root, "best") is not None and pointed(root, "best") is None:
        notes.append(f"`best` pointed to {_pointer_name(root, 'best')}, {_NO_FOLDER}: `best` was removed")
        (root / "best").unlink()
    return [*filter(None, notes), *_repair_latest(root)]


def _finish_replacing(replaced: Path) -> str:
    """Remove the replaced checkpoint if the new one exists, else restore it. Return a note if it was restored."""
    directory = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
    if directory.is_dir():
        _remove(replaced)
        return ""
    replaced.rename(directory)
    return f"{directory.name} was being replaced when the run was killed: the old checkpoint was restored"


def _repair_latest(root: Path) -> list[str]:
    """Point `latest` to the newest complete checkpoint, unless it points to a complete one. Return a sentence that
    names those that were passed over."""
    name = _pointer_name(root, "latest")
    damages: dict[str, str] = {}
    if name:
        found = pointed(root, "latest")
        damages[name if found is None else found.name] = _NO_FOLDER if found is None else damage(found)
        if not any(damages.values()):
            return []
    problem = "there is no `latest`" if name is None else f"`latest` points to {name or 'nothing'}"
    steps = _steps(root)
    for path in sorted(steps, key=steps.__getitem__, reverse=True):
        if path.name not in damages:
            damages[path.name] = damage(path)
        if not damages[path.name]:
            point(root, "latest", path)
            passed = f" (passed over: {_in_words(damages)})" if any(damages.values()) else ""
            return [f"{problem}: it now points to {path.name}, the newest complete checkpoint{passed}"]
    if steps or name is not None:
        raise CheckpointError(
            f"cannot continue in {root}: {problem}, and no checkpoint there is complete "
            f"({_in_words(damages) or 'there are none'}). Restore a copy of one ({PREFIX}N with its {STATE}/), or "
            f"choose {ANOTHER_NAME}"
        )
    return []


def _in_words(damages: Mapping[str, str]) -> str:
    return ", ".join(f"{name}, {reason}" for name, reason in damages.items() if reason)


def damage(directory: Path) -> str:
    """Return what is wrong with a checkpoint: a file that a resume needs is missing, or has changed since it was
    written. Empty if it is whole. Raises `CheckpointError` if a file cannot be read, which says nothing of what it
    holds."""
    if not _is(directory, stat.S_ISDIR):
        return _NO_FOLDER
    inner = directory / STATE
    needed = [inner / "state.json", directory / "config.json"]
    needed += [inner / f"{name}.safetensors" for name in ("optimizer", "random")]
    missing = [path.relative_to(directory).as_posix() for path in needed if not _is(path, stat.S_ISREG)]
    try:
        if not any(path.suffix == ".safetensors" for path in directory.iterdir()):
            missing.append("model.safetensors")
        changed = [] if missing else changed_files(directory)
    except OSError as error:
        raise _unreadable(directory, error) from error
    if missing:
        return f"which lacks {' and '.join(missing)}"
    return f"whose {' and '.join(changed)} changed since it was written" if changed else ""


def is_whole(directory: Path) -> bool:
    """Whether a checkpoint has all files that a resume needs, as they were written."""
    return not damage(directory)


def _steps(root: Path) -> dict[Path, int]:
    """Return the checkpoints in `root` with their steps."""
    numbers = {path: path.name.removeprefix(PREFIX) for path in root.glob(f"{PREFIX}*") if path.is_dir()}
    return {path: int(number) for path, number in numbers.items() if number.isdigit()}


def _copy_unchanged(source: Path, directory: Path) -> None:
    """Copy tokenizer, chat template and generation config, if the model was loaded from a local directory."""
    if not source.is_dir():
        return
    for file in source.iterdir():
        weights = file.suffix in {".safetensors", ".bin", ".pt", ".pth"} or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copyfile(file, directory / file.name)


def _random_state() -> dict[str, torch.Tensor]:
    import torch

    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def parts(tensors: Mapping[str, torch.Tensor], most: int = PART_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tensors, some at a time, for files of at most so many bytes (of a single larger tensor, more)."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > most:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _flush(path: Path) -> None:
    """Flush a file or directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def best_of_run(folder: Path) -> Path | None:
    """Return the checkpoint of a run's folder that was evaluated best, or the latest; None if it is no run's folder.
    Raises `ModelError` if it has none."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has adapters alone: serve the checkpoint that it lies in, whose weights have them merged in, "
            f"or the model that they were trained on with --adapter NAME={folder}"
        )
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    checkpoint = pointed(folder, "best") or pointed(folder, "latest")
    if checkpoint is None and (folder / "resolved.json").is_file():
        raise ModelError(f"the run {folder} has no checkpoint yet (best, latest): there is no model of it")
    return checkpoint
