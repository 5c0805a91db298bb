"""The critic: a copy of the model with a value head instead of the output layer, trained along with the policy.

In: `Pack`s, and the return of each loss entry. Out: values, and an updated critic. The value of an entry is computed
from the hidden state that predicts its token: the state before the action. The head is initialized to 0, so the first
values are all 0.

Shape suffixes: E loss entries of a pack, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sharpen.config.trainer import CriticConfig, TrainerConfig
from sharpen.errors import CheckpointError
from sharpen.learning.algorithm.losses import value_loss
from sharpen.learning.trainer import checkpoint
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.optimizer import Optimizer
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.scores import to_device
from sharpen.learning.trainer.team import IDLE, Team
from sharpen.learning.trainer.work import Part

_HEAD = "value_head"
_WEIGHTS, _OPTIMIZER = "critic", "critic_optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticUpdate:
    """The measurements of one update of the critic: its loss, and the share of clipped entries."""

    loss: float
    clip_fraction: float


class Critic:
    """Owns the weights and the optimizer of the critic."""

    def __init__(
        self,
        model: TrainedModel,
        *,
        config: CriticConfig,
        trainer_config: TrainerConfig,
        planned_updates: int,
        team: Team | None = None,
    ) -> None:
        """Take over `model`, whose output embeddings are not used, and shard it if `team` has several ranks."""
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
            tables=model.tables(),
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
        """Load a Hugging Face model and add a value head. Raises `ModelError` for unsupported architectures."""
        model = TrainedModel.load(
            source,
            dtype=trainer_config.dtype,
            device=device,
            gradient_checkpointing=trainer_config.gradient_checkpointing,
            offload_activations=trainer_config.offload_activations,
        )
        return cls(model, config=config, trainer_config=trainer_config, planned_updates=planned_updates, team=team)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the trained parameters by name: the model's and the head's, without untied output embeddings."""
        module = self._model.module
        unused = module.get_output_embeddings().weight
        tied = unused is module.get_input_embeddings().weight
        yield from ((name, p) for name, p in self._model.parameters() if tied or p is not unused)

    def values(self, pack: Pack) -> torch.Tensor:
        """Return the value of the state before each loss entry's token, shape E."""
        return self._model.read(pack, self._head)

    def backward(self, parts: Sequence[Part]) -> CriticUpdate:
        """Add the gradient of an update; its loss is the mean over all loss entries."""
        num_entries = sum(part.pack.num_trained_tokens for part in parts)
        results = self._team.map(parts, lambda part: self._backward(part, num_entries), self._backward_idle)
        return CriticUpdate(
            loss=sum(loss for loss, _ in results),
            clip_fraction=sum(clipped for _, clipped in results) / max(num_entries, 1),
        )

    def _backward(self, part: Part, num_entries: int) -> tuple[float, float]:
        """Add the gradient of a pack. Return its share of the loss, and its number of clipped entries."""
        assert part.values_E is not None
        assert part.returns_E is not None
        values_E = self.values(part.pack)
        old_E, returns_E = (to_device(tensor, values_E.device) for tensor in (part.values_E, part.returns_E))
        losses_E, clipped_E = value_loss(values_E, old_E, returns_E, clip=self._config.value_clip)
        loss = losses_E.sum() / num_entries
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), float(clipped_E.sum())

    def _backward_idle(self) -> None:
        values_E = self.values(IDLE)
        values_E.backward(torch.zeros_like(values_E))  # type: ignore[no-untyped-call]

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return weights and optimizer state, for the `further` tensors of a checkpoint."""
        weights = {name: parameter.detach() for name, parameter in self.parameters()}
        return {_WEIGHTS: weights, _OPTIMIZER: self.optimizer.state_tensors()}

    def restore(self, further: Mapping[str, Mapping[str, torch.Tensor]], directory: Path) -> None:
        """Load the `state_tensors` of the checkpoint in `directory`. Raises `CheckpointError` if they are missing or of
        another model."""
        if _WEIGHTS not in further or _OPTIMIZER not in further:
            raise CheckpointError(
                f"{directory} holds no critic: the run that wrote it used an algorithm without one; start a new run"
            )
        checkpoint.copy_into(dict(self.parameters()), further[_WEIGHTS], directory)
        self.optimizer.load_state_tensors(further[_OPTIMIZER])
