"""What a checkpoint holds of the trainer, read without the trainer.

In: the folder of a checkpoint, or of the model before training. Out: a `State`, and how it was computed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sharpen.evidence.certificate.plain_adamw import KINDS, State

_COUNT = "step"
"""What the optimizer calls the number of updates of a weight."""
_ADAPTERS_AT_START = "adapters_at_start.safetensors"
"""What a run that trains adapters began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The trainer's state after a step. `rounded` is whether products were computed in bfloat16; `adapters` are the
    settings of the adapters, if these train."""

    state: State
    rounded: bool
    adapters: dict[str, Any] | None


def read_state(folder: Path) -> SavedState:
    """Read a checkpoint. Raises `OSError`, `ValueError`, `KeyError` or `SafetensorError` if it is damaged."""
    inner = folder / "trainer_state"
    content = json.loads((inner / "state.json").read_text(encoding="utf-8"))
    model = _tensors(sorted(folder.glob("*.safetensors")))
    weights = _tensors(_parts(inner, "weights")) or model
    critic = _tensors(_parts(inner, "critic"))
    version = int(content["version"])
    state = _state(weights, _tensors(_parts(inner, "optimizer")), version)
    state.kl_coef = content.get("kl_coef")
    state.critic = _state(critic, _tensors(_parts(inner, "critic_optimizer")), version) if critic else None
    return SavedState(
        state=state,
        rounded=any(tensor.dtype == torch.bfloat16 for tensor in model.values()),
        adapters=content.get("adapters"),
    )


def records_adapters_at_start(run_dir: Path) -> bool:
    """Whether a run recorded the adapters that it began with; earlier versions did not."""
    return (run_dir / _ADAPTERS_AT_START).exists()


def read_adapters_at_start(run_dir: Path) -> dict[str, torch.Tensor]:
    """Read the adapters that a run began with. Raises `ValueError` if they have an effect, so that the run did not
    begin with its model; `OSError` or `SafetensorError` if the file is damaged."""
    file = run_dir / _ADAPTERS_AT_START
    adapters = _tensors([file])
    if wrong := [name for name, tensor in adapters.items() if ".lora_B." in name and bool(tensor.any())]:
        raise ValueError(f"{file.name}: {wrong[0]} is not 0 before the first update")
    return adapters


def num_weights(folder: Path) -> int:
    """Return how many numbers the files of a checkpoint's model hold."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total


def _parts(inner: Path, name: str) -> list[Path]:
    """The files of some tensors: one, or several numbered ones."""
    return [*inner.glob(f"{name}.safetensors"), *inner.glob(f"{name}.*.safetensors")]


def _state(weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor], version: int) -> State:
    split = {name: name.rpartition("/") for name in optimizer}
    return State(
        weights={name: tensor.float() for name, tensor in weights.items()},
        moments={name: tensor for name, tensor in optimizer.items() if split[name][2] in KINDS},
        counts={split[name][0]: int(tensor) for name, tensor in optimizer.items() if split[name][2] == _COUNT},
        version=version,
    )


def _tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    return found
