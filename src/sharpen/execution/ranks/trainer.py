"""One rank of a trainer of several processes: what runs in each of them, wherever it was placed.

In: a `TrainerPlan`, the same for all, and which rank this is. Out: a trainer whose weights are this rank's part, and
whose methods the coordinator calls on all ranks alike (`execution.ranks.group`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sharpen.algorithm.presets import Algorithm
from sharpen.algorithm.supervised import SupervisedAlgorithm
from sharpen.config.trainer import CriticConfig, TrainerConfig
from sharpen.supervised.trainer import SupervisedTrainer
from sharpen.trainer.model import DType
from sharpen.trainer.sharding import whole
from sharpen.trainer.team import Ranks, Team
from sharpen.trainer.trainer import Trainer
from sharpen.types import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """What trains: the arguments of `Trainer.from_pretrained`, or of `SupervisedTrainer.from_pretrained` for an
    algorithm that learns from rows. It pickles."""

    model_path: str
    algorithm: Algorithm | SupervisedAlgorithm
    config: TrainerConfig
    learning_rate: float
    planned_updates: int
    seed: int
    teacher_path: str | None = None
    critic: CriticConfig = field(default_factory=CriticConfig)
    probe: Sequence[Experience] = ()
    engine_dtype: DType = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """A batch as it travels to the ranks: `trainer.trainer.Batch` and nothing else."""

    experiences: Sequence[Experience]
    experts: Sequence[Experience] = ()


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


def load_trainer(
    plan: TrainerPlan, device: str | torch.device, team: Team | None = None
) -> Trainer | SupervisedTrainer:
    """The trainer of a plan in this process: all of it, or one rank's part where there is a team. Raises `ModelError`
    and its kin."""
    arguments: dict[str, Any] = {
        "config": plan.config,
        "learning_rate": plan.learning_rate,
        "planned_updates": plan.planned_updates,
        "device": device,
        "seed": plan.seed,
        "team": team,
    }
    if isinstance(plan.algorithm, SupervisedAlgorithm):
        return SupervisedTrainer.from_pretrained(Path(plan.model_path), algorithm=plan.algorithm, **arguments)
    return Trainer.from_pretrained(
        plan.model_path,
        algorithm=plan.algorithm,
        teacher_path=plan.teacher_path,
        critic=plan.critic,
        probe=plan.probe,
        engine_dtype=plan.engine_dtype,
        **arguments,
    )


class RankTrainer:
    """A rank's trainer. Every method is called on all ranks with the same arguments, and returns when this one is
    done."""

    def __init__(self, plan: TrainerPlan, ranks: Ranks) -> None:
        """Load the models, together with the other ranks. Raises `ModelError` and its kin, as a trainer in one process
        does."""
        self._ranks = ranks
        self._trainer = load_trainer(plan, ranks.device, ranks)

    def run(self, method: str, *arguments: Any, **named: Any) -> Any:
        """A method of the trainer: `train_step`, `measure`, `back_to`, `save`, `restore`. Errors are its own."""
        return getattr(self._trainer, method)(*arguments, **named)

    def look(self, name: str) -> Any:
        """An attribute of the trainer: `version`, `lines`, `rounding`."""
        return getattr(self._trainer, name)

    def weight_specs(self) -> list[WeightSpec]:
        """The weights to act with, in the order in which `give_weights` gives them."""
        policy = self._trainer.policy
        named = policy.acting(policy.module.named_parameters())
        return [WeightSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in named]

    def give_weights(self, take: Callable[[str, torch.Tensor], None]) -> None:
        """Gather the weights to act with one after the other; `take` gets each on the first rank, by its Hugging Face
        name (tied ones once), whole, on the device. It must copy what it wants to keep."""
        policy = self._trainer.policy
        for name, tensor in policy.acting(policy.module.named_parameters()):
            full = whole(tensor.detach())
            if self._ranks.rank == 0:
                take(name, full)

    def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()
