"""What a checkpoint holds of the trainer, read without the trainer.

In: the folder of a checkpoint, or of the model before training. Out: a `State`, and how it was computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sharpen.errors import CheckpointError
from sharpen.evidence.certificate.plain.optimizers import ADAMW, KINDS, State
from sharpen.evidence.certificate.plain.quantized import EightBits

_COUNT = "step"
"""What the optimizer calls the number of updates of a weight."""
_BITSANDBYTES = {"state1": ADAMW[0], "state2": ADAMW[1]}
"""How optimizers in 8 bits call AdamW's moments; `absmax1` and `absmax2` are the largest numbers of their blocks."""
_ADAPTERS_AT_START = "adapters_at_start.safetensors"
"""What a run that trains adapters began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The trainer's state after a step. `rounded` is whether products were computed in bfloat16; `adapter_scale` is the
    factor of the adapters' product, None if all weights train."""

    state: State
    rounded: bool
    adapter_scale: float | None


def read_state(folder: Path) -> SavedState:
    """Read a checkpoint. Raises `CheckpointError` if it is damaged, another `OSError` if the machine cannot read it."""
    inner = folder / "trainer_state"
    with _damage(folder.name):
        content = json.loads((inner / "state.json").read_text(encoding="utf-8"))
        model = _tensors(sorted(folder.glob("*.safetensors")))
        weights = _tensors(_parts(inner, "weights")) or model
        critic = _tensors(_parts(inner, "critic"))
        version, adapters = int(content["version"]), content.get("adapters")
        state = _state(weights, _tensors(_parts(inner, "optimizer")), version)
        state.kl_coef = content.get("kl_coef")
        state.critic = _state(critic, _tensors(_parts(inner, "critic_optimizer")), version) if critic else None
        return SavedState(
            state=state,
            rounded=any(tensor.dtype == torch.bfloat16 for tensor in model.values()),
            adapter_scale=None if adapters is None else float(adapters["alpha"]) / float(adapters["rank"]),
        )


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Raise `CheckpointError` for what is wrong with files; that a machine cannot read them is none of that."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{name} is damaged ({type(error).__name__}: {error})") from error


def records_adapters_at_start(run_dir: Path) -> bool:
    """Whether a run recorded the adapters that it began with; earlier versions did not."""
    return (run_dir / _ADAPTERS_AT_START).exists()


def read_adapters_at_start(run_dir: Path) -> dict[str, torch.Tensor]:
    """Read the adapters that a run began with. Raises `CheckpointError` if the file is damaged, or if they have an
    effect, so that the run did not begin with its model."""
    file = run_dir / _ADAPTERS_AT_START
    with _damage(file.name):
        adapters = _tensors([file])
    if wrong := [name for name, tensor in adapters.items() if ".lora_B." in name and bool(tensor.any())]:
        raise CheckpointError(f"{file.name}: {wrong[0]} is not 0 before the first update")
    return adapters


def sizes_of(folder: Path) -> dict[str, int]:
    """Return how many numbers each tensor in the files of a checkpoint's model has."""
    sizes: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            sizes |= {name: math.prod(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return sizes


def num_weights(folder: Path) -> int:
    """Return how many numbers they have together."""
    return sum(sizes_of(folder).values())


def _parts(inner: Path, name: str) -> list[Path]:
    """The files of some tensors: one, or several numbered ones."""
    return [*inner.glob(f"{name}.safetensors"), *inner.glob(f"{name}.*.safetensors")]


def _state(weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor], version: int) -> State:
    state = State(weights={name: tensor.float() for name, tensor in weights.items()}, version=version)
    stored = {}
    for key, tensor in optimizer.items():
        name, _, kind = key.rpartition("/")
        if kind in KINDS:
            state.moments[key] = tensor
        elif kind == _COUNT:
            state.counts[name] = int(tensor)
        elif kind in _BITSANDBYTES:
            own = f"{name}/{_BITSANDBYTES[kind]}"
            state.counts[name] = version
            if tensor.dtype == torch.uint8:
                largest = optimizer[f"{name}/absmax{kind[-1]}"]
                stored[own] = EightBits(codes=tensor, largest=largest, signed=kind == "state1")
                tensor = stored[own].values()
            state.moments[own] = tensor
    state.stored = stored
    return state


def _tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in files:
        file.open("rb").close()  # safetensors says of any file that it cannot open that there is none
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    return found
