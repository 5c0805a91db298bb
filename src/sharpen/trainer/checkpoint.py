"""Checkpoints: Hugging Face directories that transformers and vLLM load as they are, plus `trainer_state/` for resume.

In: a model, optimizer tensors and a JSON state. Out: `global_step_N/` in the run directory, either whole or not there,
with `latest` and `best` pointing to one of them. Weights are stored in the type that the run computes in, since that
model was evaluated; where that is not fp32, the fp32 master weights lie in `trainer_state/`. A run with adapters leaves
the merged model, `adapter/` in peft's format, and the adapters in `trainer_state/`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sharpen.errors import CheckpointError
from sharpen.trainer.sharding import divided_like

if TYPE_CHECKING:
    from sharpen.trainer.model import TrainedModel
    from sharpen.trainer.team import Team

Pointer = Literal["latest", "best"]
PREFIX = "global_step_"
STATE = "trainer_state"
ADAPTERS = "adapters"
_MODEL = "model"
_OWN_FILES = ("weights", "optimizer", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a checkpoint holds for resume. `weights` are the fp32 master weights (or adapters) by name; `further` are
    tensors that the run saved beside, by the name it gave them."""

    weights: Mapping[str, torch.Tensor]
    optimizer_tensors: Mapping[str, torch.Tensor]
    random_state: Mapping[str, torch.Tensor]
    state: dict[str, Any]
    further: Mapping[str, Mapping[str, torch.Tensor]]


class _TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of some files, each read when it is asked for: of several ranks none holds all of them."""

    def __init__(self, *files: Path) -> None:
        """Open them. Raises `OSError` or `SafetensorError` if one is not there, or not whole."""
        opened: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (it is no mapping)

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found

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
    """Write a checkpoint at `directory`, replacing one that is there. `state` must be JSON; `further` are tensors to
    save beside (a critic's, say), by any names but those of the files there. Every rank of the team calls this; the
    first writes, and what stops it is raised by all.

    Tokenizer, chat template and generation config are the files of the local directory that `policy` came from. Raises
    `CheckpointError` (a full disk, say); then what was at `directory` stays and nothing else is left behind.
    """

    pieces = _pieces(policy, {"optimizer": optimizer_tensors, **(further or {})}, team)

    def write(partial: Path) -> None:
        inner = partial / STATE
        inner.mkdir()
        for name, tensors in pieces:
            if name == _MODEL:
                policy.write(partial, tensors)
                _copy_unchanged(Path(policy.module.config._name_or_path), partial)
                continue
            if name == "weights":
                policy.write_trained(partial, tensors)
            save_file(_on_cpu(tensors), inner / f"{name}.safetensors")
        save_file(_random_state(), inner / "random.safetensors")
        whole = dict(state) if policy.adapters is None else {**state, ADAPTERS: policy.adapters}
        (inner / "state.json").write_text(json.dumps(whole, indent=2) + "\n")

    failure = None
    if team.rank == 0:
        try:
            write_directory(directory, write)
        except CheckpointError as error:
            failure = error
    for _ in pieces:  # what this rank did not write it gathers for the others all the same
        pass
    team.agree(failure)


def _pieces(
    policy: TrainedModel, further: Mapping[str, Mapping[str, torch.Tensor]], team: Team
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The tensors of a checkpoint file by file, each gathered when it is asked for, so that no more is held at once."""
    yield _MODEL, team.gather(policy.written())
    if policy.compute_dtype != torch.float32 or policy.adapters is not None:
        yield "weights", team.gather(policy.parameters())
    for name, tensors in further.items():
        yield name, team.gather(tensors.items())


def load(directory: Path) -> SavedState:
    """Open a checkpoint. Raises `CheckpointError` if something is missing or cannot be read."""
    inner = directory / STATE
    master = inner / "weights.safetensors"
    try:
        weights = [master] if master.exists() else sorted(directory.glob("*.safetensors"))
        others = [file for file in inner.glob("*.safetensors") if file.stem not in _OWN_FILES]
        return SavedState(
            weights=_TensorFiles(*weights),
            optimizer_tensors=_TensorFiles(inner / "optimizer.safetensors"),
            random_state=_TensorFiles(inner / "random.safetensors"),
            state=json.loads((inner / "state.json").read_text()),
            further={file.stem: _TensorFiles(file) for file in others},
        )
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot resume from {directory}: {error}") from error


def restore_policy(policy: TrainedModel, saved: SavedState, directory: Path) -> None:
    """Give a model the weights of the checkpoint in `directory`.

    Raises `CheckpointError`, with nothing changed, if it is not one of this model, or of other adapters.
    """
    if (before := saved.state.get(ADAPTERS)) != policy.adapters:
        raise CheckpointError(
            f"{directory} was written by a run that trained {_trained(before)}, but trainer.lora now asks for "
            f"{_trained(policy.adapters)}: set trainer.lora as it was, or start another run"
        )
    copy_into(dict(policy.parameters()), saved.weights, directory)


def _trained(adapters: Mapping[str, Any] | None) -> str:
    if adapters is None:
        return "all weights"
    return f"adapters ({', '.join(f'{name} {value}' for name, value in adapters.items())})"


def copy_into(
    parameters: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.Tensor], directory: Path
) -> None:
    """Overwrite parameters with the weights of the same names.

    Raises `CheckpointError`, with nothing changed, if one is missing or differs in shape.
    """
    for name, parameter in parameters.items():
        found = tuple(weights[name].shape) if name in weights else "nothing"
        if found != tuple(parameter.shape):
            raise CheckpointError(
                f"{directory} is not a checkpoint of this model: {name} should have shape {tuple(parameter.shape)}, "
                f"found {found}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(divided_like(weights[name], parameter))


def set_random_state(random_state: Mapping[str, torch.Tensor]) -> None:
    """Set torch's generators to a saved state."""
    torch.set_rng_state(random_state["cpu"])
    if "cuda" in random_state and torch.cuda.is_available():
        torch.cuda.set_rng_state(random_state["cuda"])


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint after this step is."""
    return root / f"{PREFIX}{step}"


def step_of(directory: Path) -> int:
    """The step of a checkpoint, by its name; 0 for another name."""
    number = directory.name.removeprefix(PREFIX)
    return int(number) if number.isdigit() else 0


def write_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling, flush it to the disk, and rename it to `directory`: whole, or not there.

    Raises `CheckpointError` if anything cannot be written; then, and when interrupted, the sibling is removed and what
    was at `directory` stays. What a kill leaves is put right by `repair`.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed while writing
        shutil.rmtree(replaced, ignore_errors=True)
        partial.mkdir()
        write(partial)
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        if directory.exists():
            directory.rename(replaced)
        partial.rename(directory)
        _flush(directory.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not directory.exists():
            replaced.rename(directory)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        raise CheckpointError(
            f"could not write the checkpoint {directory}: {error}. Earlier checkpoints are untouched"
        ) from error
    shutil.rmtree(replaced, ignore_errors=True)


def point(root: Path, name: Pointer, target: Path) -> None:
    """Make `root/name` a link to a directory in `root`, in one move, which is on the disk on return; without links, a
    file with its name."""
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
    """The checkpoint that `root/name` points to, if it is there."""
    named = _named(root, name)
    return root / named if named and (root / named).is_dir() else None


def _named(root: Path, name: Pointer) -> str | None:
    """What `root/name` points to, there or not; None where there is no pointer."""
    pointer = root / name
    if pointer.is_symlink():
        return os.readlink(pointer)
    return pointer.read_text().strip() if pointer.is_file() else None


def prune(root: Path, keep: int) -> list[Path]:
    """Remove all checkpoints but the best, the latest, and the `keep` newest others; returns what was removed."""
    kept = {pointed(root, "latest"), pointed(root, "best")}
    steps = _steps(root)
    others = sorted((path for path in steps if path not in kept), key=steps.__getitem__, reverse=True)
    for path in others[keep:]:
        removed = path.with_name(f".{path.name}.removed")  # half a checkpoint never has a checkpoint's name
        path.rename(removed)
        shutil.rmtree(removed)
    return others[keep:]


def repair(root: Path) -> list[str]:
    """Put right what a kill, or somebody's hand, left of the checkpoints in `root`; a sentence for each thing done.

    Afterwards `latest` and `best` point to checkpoints that are there, or are not there, and `latest` can be resumed
    from. Raises `CheckpointError` if there are checkpoints, but none that is whole.
    """
    said = [_put_back(replaced) for replaced in sorted(root.glob(f".{PREFIX}*.replaced"))]
    for left in (*root.glob(f".{PREFIX}*.partial"), *root.glob(f".{PREFIX}*.removed")):
        shutil.rmtree(left)
    if _named(root, "best") is not None and pointed(root, "best") is None:
        said.append(f"`best` pointed to {_named(root, 'best')}, which is not there: it is removed")
        (root / "best").unlink()
    return [*filter(None, said), *_repair_latest(root)]


def _put_back(replaced: Path) -> str:
    """A checkpoint that was being replaced: the new one if that is there, else the old one."""
    directory = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
    if directory.is_dir():
        shutil.rmtree(replaced)
        return ""
    replaced.rename(directory)
    return f"{directory.name} was being replaced when the run was killed: it is back as it was before"


def _repair_latest(root: Path) -> list[str]:
    named = _named(root, "latest")
    if named and is_whole(root / named):
        return []
    steps = _steps(root)
    what = "there is no `latest`" if named is None else f"`latest` points to {named or 'nothing'}, which is not whole"
    if whole := [path for path in steps if is_whole(path)]:
        newest = max(whole, key=steps.__getitem__)
        point(root, "latest", newest)
        return [f"{what}: it now points to {newest.name}, the newest whole checkpoint"]
    if steps or named is not None:
        raise CheckpointError(
            f"cannot go on in {root}: {what}, and none of its checkpoints is whole "
            f"({', '.join(sorted(path.name for path in steps)) or 'there are none'}). Put a copy of one back "
            f"({PREFIX}N with its {STATE}/), or choose another experiment_name"
        )
    return []


def is_whole(directory: Path) -> bool:
    """Whether a checkpoint has everything that a resume reads."""
    inner = directory / STATE
    needed = (directory / "config.json", *(inner / f"{name}.safetensors" for name in ("optimizer", "random")))
    return (
        (inner / "state.json").is_file()
        and all(file.is_file() for file in needed)
        and any(directory.glob("*.safetensors"))
    )


def _steps(root: Path) -> dict[Path, int]:
    """Checkpoints and their steps."""
    found = {path: path.name.removeprefix(PREFIX) for path in root.glob(f"{PREFIX}*") if path.is_dir()}
    return {path: int(number) for path, number in found.items() if number.isdigit()}


def _copy_unchanged(source: Path, directory: Path) -> None:
    """Tokenizer, chat template and generation config byte for byte, if the model came from a local directory."""
    if not source.is_dir():
        return
    for file in source.iterdir():
        weights = file.suffix in {".safetensors", ".bin", ".pt", ".pth"} or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copyfile(file, directory / file.name)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _flush(path: Path) -> None:
    """Wait until a file or directory entry is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
