"""One rank of a trainer of several processes: what runs in each of them, wherever it was placed.

In: a `TrainerPlan`, the same for all, and which rank this is. Out: a trainer whose weights are this rank's part, and
whose methods the coordinator calls on all ranks alike (`execution.ranks.group`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sharpen.trainer.roles import TrainerPlan
from sharpen.trainer.sharding import whole
from sharpen.trainer.team import Ranks
from sharpen.trainer.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One tensor of the weights to act with."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


class RankTrainer:
    """A rank's trainer. Every method is called on all ranks with the same arguments, and returns when this one is
    done."""

    def __init__(self, plan: TrainerPlan, ranks: Ranks) -> None:
        """Load the models, together with the other ranks. Raises `ModelError` and its kin, as a trainer in one process
        does."""
        self._ranks = ranks
        self._trainer = Trainer.load(plan, ranks.device, ranks)

    def run(self, method: str, *arguments: Any, **named: Any) -> Any:
        """A method of the trainer: `train_step`, `measure`, `back_to`, `save`, `restore`. Errors are its own."""
        return getattr(self._trainer, method)(*arguments, **named)

    def look(self, name: str) -> Any:
        """An attribute of the trainer: `version`, `lines`, `rounding`."""
        return getattr(self._trainer, name)

    def weight_specs(self) -> list[WeightSpec]:
        """The weights to act with, in the order in which `give_weights` gives them."""
        policy = self._trainer.policy
        named = policy.merge_adapters(policy.module.named_parameters())
        return [WeightSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in named]

    def give_weights(self, take: Callable[[str, torch.Tensor], None]) -> None:
        """Gather the weights to act with one after the other; `take` gets each on the first rank, by its Hugging Face
        name (tied ones once), whole, on the device. It must copy what it wants to keep."""
        policy = self._trainer.policy
        for name, tensor in policy.merge_adapters(policy.module.named_parameters()):
            full = whole(tensor.detach())
            if self._ranks.rank == 0:
                take(name, full)

    def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()
