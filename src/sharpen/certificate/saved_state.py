"""What a checkpoint holds of the trainer, read without the trainer.

In: the folder of a checkpoint, or of the model before training. Out: a `State`, and how it was computed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sharpen.certificate.plain_update import KINDS, State

_COUNT = "step"
"""What the optimizer calls the number of updates of a weight."""


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
    weights = _tensors(sorted(inner.glob("weights*.safetensors"))) or model
    optimizer = _tensors(sorted(inner.glob("optimizer*.safetensors")))
    moments = {name: tensor for name, tensor in optimizer.items() if name.rpartition("/")[2] in KINDS}
    counts = {
        name.rpartition("/")[0]: int(tensor) for name, tensor in optimizer.items() if name.rpartition("/")[2] == _COUNT
    }
    return SavedState(
        state=State(
            weights={name: tensor.float() for name, tensor in weights.items()},
            moments=moments,
            counts=counts,
            version=int(content["version"]),
            kl_coef=content.get("kl_coef"),
        ),
        rounded=any(tensor.dtype == torch.bfloat16 for tensor in model.values()),
        adapters=content.get("adapters"),
    )


def _tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    return found
