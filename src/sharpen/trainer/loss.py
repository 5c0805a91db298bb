"""What the trainer sees of a loss: how the gradient of each update of a step is computed.

In: a batch for each update. Out: gradients, and metrics of the step. `RolloutLoss` and `RowLoss` are the two.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sharpen.trainer.checkpoint import SavedState
from sharpen.trainer.model import Scorer, TrainedModel
from sharpen.trainer.packing import Pack
from sharpen.trainer.team import IDLE, Team
from sharpen.trainer.work import Part, TrainingBatch, Work
from sharpen.types import Experience


class Loss(ABC):
    """A step is `begin`, `backward` for each update, `end`. One that was left in the midst ends where the next begins.

    `algorithm` is all that changes from step to step.
    """

    algorithm: Any

    def __init__(self, policy: TrainedModel, *, max_tokens: int, reference: Scorer | None, team: Team) -> None:
        """Packs have at most `max_tokens`."""
        self._policy = policy
        self._max_tokens = max_tokens
        self._reference = reference
        self._team = team

    @abstractmethod
    def begin(
        self, batches: Sequence[TrainingBatch], *, version: int, step: int | None, probe: Sequence[Experience]
    ) -> list[Work]:
        """Everything that is computed with the weights before the step, which are of this version; what there is to do
        in each update. See `Trainer.train_step`."""

    @abstractmethod
    def backward(self, work: Work, version: int) -> None:
        """Add the gradient of an update to weights of this version. Raises `ParityError` if they are not those of the
        engine."""

    @abstractmethod
    def end(self, works: Sequence[Work]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Metrics of the step by name, and alarms."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint needs to know of the loss, as JSON."""
        return {}

    def state_tensors(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Tensors of the loss that a checkpoint needs, by the names of their files."""
        return {}

    def restore(self, saved: SavedState, directory: Path) -> None:  # noqa: B027 (not every loss has something to restore)
        """Take back both from the checkpoint in `directory`. Raises `CheckpointError` if it is that of another run."""

    def _parts(self, experiences: Sequence[Experience]) -> list[Part]:
        """Sequences in packs, with the reference's logprobs if there is one."""
        parts = [Part(pack=pack) for pack in self._packs(experiences)]
        if (reference := self._reference) is not None:
            for part, logprobs_E in self._each(parts, lambda pack: reference.score(pack).logprobs_E):
                part.reference_E = logprobs_E
        return parts

    def _packs(self, experiences: Sequence[Experience]) -> list[Pack]:
        return self._team.packs(experiences, self._max_tokens)

    def _each(
        self, parts: Sequence[Part], score: Callable[[Pack], torch.Tensor]
    ) -> Iterator[tuple[Part, torch.Tensor]]:
        """Each part with its score (shape E) on the CPU, computed without gradient by the rank that has it."""
        with torch.no_grad():
            found = self._team.map(parts, lambda part: score(part.pack).cpu(), lambda: score(IDLE))
        return zip(parts, found, strict=True)
