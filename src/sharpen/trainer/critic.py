"""The critic: a copy of the model with a value head instead of its vocabulary, trained beside the policy.

In: `Pack`s, and for each loss entry the return that was seen. Out: values, and an updated critic. The value of an entry
is read from the hidden state that predicts its token, that is, from the state before the action. The head starts at 0,
so that the first advantages are those of a critic that knows nothing.

Shape suffixes: E loss entries of a pack, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sharpen.algorithm.losses import value_loss
from sharpen.config.trainer import CriticConfig, TrainerConfig
from sharpen.errors import CheckpointError
from sharpen.trainer import checkpoint
from sharpen.trainer.model import TrainedModel
from sharpen.trainer.optimizer import Optimizer
from sharpen.trainer.packing import Pack
from sharpen.trainer.scores import to_device
from sharpen.trainer.team import IDLE, Team
from sharpen.trainer.work import Part

_HEAD = "value_head"
_WEIGHTS, _OPTIMIZER = "critic", "critic_optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticUpdate:
    """What one update of the critic measured: its loss, the share of entries that the clip held."""

    loss: float
    clip_fraction: float


class Critic:
    """Owns the critic's weights and their optimizer."""

    def __init__(
        self,
        model: TrainedModel,
        *,
        config: CriticConfig,
        trainer_config: TrainerConfig,
        planned_updates: int,
        team: Team | None = None,
    ) -> None:
        """Take over `model`, whose output embeddings are not used; here it is divided where `team` has several
        ranks."""
        self._model = model
        self._config = config
        self._team = team or Team()
        body = model.module.get_input_embeddings().weight
        self._head = torch.nn.Linear(body.shape[1], 1, device=body.device, dtype=body.dtype)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        model.module.add_module(_HEAD, self._head)
        self._team.divide(model, cpu_offload=trainer_config.cpu_offload)
        own = ("warmup_steps", "weight_decay", "max_grad_norm")
        self.optimizer = Optimizer(
            self.parameters(),
            trainer_config.model_copy(update={name: getattr(config, name) for name in own}),
            peak_learning_rate=config.learning_rate,
            planned_updates=planned_updates,
            name="critic",
        )

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        config: CriticConfig,
        trainer_config: TrainerConfig,
        planned_updates: int,
        device: torch.device,
        team: Team | None = None,
    ) -> Critic:
        """Start from a Hugging Face model. Raises `ModelError` as the policy does."""
        model = TrainedModel.load(
            source,
            dtype=trainer_config.dtype,
            device=device,
            gradient_checkpointing=trainer_config.gradient_checkpointing,
        )
        return cls(model, config=config, trainer_config=trainer_config, planned_updates=planned_updates, team=team)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters by name: the model's without output embeddings of its own, and the head's."""
        module = self._model.module
        unused = module.get_output_embeddings().weight
        tied = unused is module.get_input_embeddings().weight
        yield from ((name, p) for name, p in self._model.parameters() if tied or p is not unused)

    def values(self, pack: Pack) -> torch.Tensor:
        """The value of the state before each loss entry's token, shape E."""
        return self._model.read(pack, self._head)

    def backward(self, parts: Sequence[Part]) -> CriticUpdate:
        """Add the gradient of an update, whose loss is the mean over its loss entries."""
        num_entries = sum(part.pack.num_trained_tokens for part in parts)
        found = self._team.map(parts, lambda part: self._backward(part, num_entries), self._backward_nothing)
        return CriticUpdate(
            loss=sum(loss for loss, _ in found),
            clip_fraction=sum(clipped for _, clipped in found) / max(num_entries, 1),
        )

    def _backward(self, part: Part, num_entries: int) -> tuple[float, float]:
        """Add a pack's gradient; its part of the loss, and how many of its entries the clip held."""
        assert part.values_E is not None
        assert part.returns_E is not None
        values_E = self.values(part.pack)
        old_E, returns_E = (to_device(known, values_E.device) for known in (part.values_E, part.returns_E))
        losses_E, clipped_E = value_loss(values_E, old_E, returns_E, clip=self._config.value_clip)
        loss = losses_E.sum() / num_entries
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), float(clipped_E.sum())

    def _backward_nothing(self) -> None:
        values_E = self.values(IDLE)
        values_E.backward(torch.zeros_like(values_E))  # type: ignore[no-untyped-call]

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Weights and optimizer state, for a checkpoint's `further` tensors."""
        weights = {name: parameter.detach() for name, parameter in self.parameters()}
        return {_WEIGHTS: weights, _OPTIMIZER: self.optimizer.state_tensors()}

    def restore(self, further: Mapping[str, Mapping[str, torch.Tensor]], directory: Path) -> None:
        """Take back what `state_tensors` gave, from the checkpoint in `directory`. Raises `CheckpointError`."""
        if _WEIGHTS not in further or _OPTIMIZER not in further:
            raise CheckpointError(
                f"{directory} holds no critic: the run that wrote it used an algorithm without one; start another run"
            )
        checkpoint.copy_into(dict(self.parameters()), further[_WEIGHTS], directory)
        self.optimizer.load_state_tensors(further[_OPTIMIZER])
