"""The critic: a copy of the model with a value head instead of its vocabulary, trained beside the policy.

In: `Pack`s, and for each loss entry the return that was seen. Out: values, and an updated critic. The value of an entry
is read from the hidden state that predicts its token, that is, from the state before the action. The head starts at 0,
so that the first advantages are those of a critic that knows nothing.

Shape suffixes: E loss entries of a pack, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from agenttune.algorithm.losses import value_loss
from agenttune.config.trainer import CriticConfig, TrainerConfig
from agenttune.errors import CheckpointError, TrainingError
from agenttune.trainer import checkpoint
from agenttune.trainer.model import TrainedModel
from agenttune.trainer.optimizer import Optimizer
from agenttune.trainer.packing import Pack

_WEIGHTS, _OPTIMIZER = "critic", "critic_optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticUpdate:
    """What one update of the critic measured: its loss, the share of entries that the clip held, norm and rate."""

    loss: float
    clip_fraction: float
    grad_norm: float
    learning_rate: float


class Critic:
    """Owns the critic's weights and their optimizer."""

    def __init__(
        self, model: TrainedModel, *, config: CriticConfig, trainer_config: TrainerConfig, planned_updates: int
    ) -> None:
        """Take over `model`, whose output embeddings are not used."""
        self._model = model
        self._config = config
        body = model.module.get_input_embeddings().weight
        self._head = torch.nn.Linear(body.shape[1], 1, device=body.device, dtype=body.dtype)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        own = ("warmup_steps", "weight_decay", "max_grad_norm")
        self._optimizer = Optimizer(
            self.parameters(),
            trainer_config.model_copy(update={name: getattr(config, name) for name in own}),
            peak_learning_rate=config.learning_rate,
            planned_updates=planned_updates,
        )
        self._loss, self._clipped, self._num_entries = 0.0, 0.0, 0

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        config: CriticConfig,
        trainer_config: TrainerConfig,
        planned_updates: int,
        device: torch.device,
    ) -> Critic:
        """Start from a Hugging Face model. Raises `ModelError` as the policy does."""
        model = TrainedModel.load(
            source,
            dtype=trainer_config.dtype,
            device=device,
            gradient_checkpointing=trainer_config.gradient_checkpointing,
        )
        return cls(model, config=config, trainer_config=trainer_config, planned_updates=planned_updates)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters by name: the model's without output embeddings of its own, and the head's."""
        module = self._model.module
        unused = module.get_output_embeddings().weight
        tied = unused is module.get_input_embeddings().weight
        yield from ((name, p) for name, p in self._model.parameters() if tied or p is not unused)
        yield from ((f"value_head.{name}", parameter) for name, parameter in self._head.named_parameters())

    def values(self, pack: Pack) -> torch.Tensor:
        """The value of the state before each loss entry's token, shape E."""
        states_EC = self._model.states(pack)
        return self._head(states_EC.to(self._head.weight.dtype)).squeeze(-1)  # type: ignore[no-any-return]

    def zero_grad(self) -> None:
        """Begin an update."""
        self._optimizer.zero_grad()
        self._loss, self._clipped, self._num_entries = 0.0, 0.0, 0

    def backward(self, pack: Pack, old_values_E: torch.Tensor, returns_E: torch.Tensor, num_entries: int) -> None:
        """Add a pack's gradient; the update's loss is the mean over its `num_entries` loss entries."""
        losses_E, clipped_E = value_loss(self.values(pack), old_values_E, returns_E, clip=self._config.value_clip)
        loss = losses_E.sum() / num_entries
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss += float(loss.detach())
        self._clipped += float(clipped_E.sum())
        self._num_entries += len(losses_E)

    def check(self, update: int) -> None:
        """Raise `TrainingError`, with nothing changed, if a gradient is NaN or infinite."""
        try:
            self._optimizer.norm(update)
        except TrainingError as error:
            raise TrainingError(f"critic: {error}") from None

    def step(self, update: int) -> CriticUpdate:
        """Apply the gradients as the update with this number; what the update measured."""
        norm, rate = self._optimizer.step(update)
        return CriticUpdate(
            loss=self._loss,
            clip_fraction=self._clipped / max(self._num_entries, 1),
            grad_norm=norm,
            learning_rate=rate,
        )

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Weights and optimizer state, for a checkpoint's `further` tensors."""
        weights = {name: parameter.detach() for name, parameter in self.parameters()}
        return {_WEIGHTS: weights, _OPTIMIZER: self._optimizer.state_tensors()}

    def restore(self, further: Mapping[str, Mapping[str, torch.Tensor]], directory: Path) -> None:
        """Take back what `state_tensors` gave, from the checkpoint in `directory`. Raises `CheckpointError`."""
        if _WEIGHTS not in further or _OPTIMIZER not in further:
            raise CheckpointError(
                f"{directory} holds no critic: the run that wrote it used an algorithm without one; start another run"
            )
        checkpoint.copy_into(dict(self.parameters()), further[_WEIGHTS], directory)
        self._optimizer.load_state_tensors(further[_OPTIMIZER])
