"""One rank of a trainer of several processes, in a local process or an actor of Ray.

In: a `TrainerPlan`, the same for all ranks, and the number of this rank. Out: a trainer that holds this rank's shard of
the weights, whose methods the coordinator calls on all ranks (`placement.ranks.group`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.sharding import whole
from sharpen.learning.trainer.team import Ranks
from sharpen.learning.trainer.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """The name, shape and dtype of one tensor of the published weights."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


class RankTrainer:
    """A rank's trainer. Every method is called on all ranks with the same arguments, and returns when this rank is
    done."""

    def __init__(self, plan: TrainerPlan, ranks: Ranks) -> None:
        """Load the models together with the other ranks. Raises what `Trainer.load` raises."""
        self._ranks = ranks
        self._trainer = Trainer.load(plan, ranks.device, ranks)

    def run(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the trainer (`train_step`, `measure`, `back_to`, `save`, `save_start`, `restore`). Raises
        what it raises."""
        return getattr(self._trainer, method)(*arguments, **named)

    def attribute(self, name: str) -> Any:
        """Return an attribute of the trainer: `version`, `lines` or `rounding`."""
        return getattr(self._trainer, name)

    def weight_specs(self) -> list[WeightSpec]:
        """Return the specs of the published weights, in the order of `give_weights`."""
        policy = self._trainer.policy
        return [WeightSpec(name=name, shape=tuple(one.shape), dtype=one.dtype) for name, one in policy.served()]

    def give_weights(self, take: Callable[[str, torch.Tensor], None]) -> None:
        """Gather the published weights one after the other. On the first rank `take` receives each with its Hugging
        Face name (tied weights once), unsharded, on the device; it must copy what it keeps."""
        policy = self._trainer.policy
        for name, tensor in policy.served():
            full = whole(tensor.detach())
            if self._ranks.rank == 0:
                take(name, full)

    def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()
