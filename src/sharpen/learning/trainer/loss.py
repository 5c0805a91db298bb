"""The interface of a loss: it computes the gradient of each update of a step. See `RolloutLoss` and `RowLoss`.

In: a batch for each update. Out: gradients, and metrics of the step.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sharpen.engine.token_masks import TokenMasks
from sharpen.learning.trainer.balance import BalanceLoss
from sharpen.learning.trainer.checkpoint import SavedState
from sharpen.learning.trainer.model import Scorer, TrainedModel
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.team import IDLE, Team
from sharpen.learning.trainer.work import Part, TrainingBatch, Work
from sharpen.types import Experience


class Loss(ABC):
    """A step calls `begin`, then `backward` for each update, then `end`. `begin` discards a step that was not finished.

    `algorithm` is the only state that lasts from one step to the next.
    """

    algorithm: Any

    def __init__(
        self,
        policy: TrainedModel,
        *,
        max_tokens: int,
        reference: Scorer | None,
        team: Team,
        masks: TokenMasks | None = None,
        balance_coef: float = 0.0,
    ) -> None:
        """`max_tokens` is the largest number of computed tokens of a pack. `masks` are those of the policy, for tokens
        that were sampled under a constraint. `balance_coef` is `trainer.balance_coef`."""
        self._policy = policy
        self._max_tokens = max_tokens
        self._reference = reference
        self._team = team
        self._masks = masks
        self._balance = BalanceLoss(policy, balance_coef, team) if balance_coef else None

    @abstractmethod
    def begin(
        self, batches: Sequence[TrainingBatch], *, version: int, step: int | None, probe: Sequence[Experience]
    ) -> list[Work]:
        """Pack the batches and compute all that needs the weights from before the step, which have this version. Return
        the work of each update. See `Trainer.train_step` for `step` and `probe`."""

    @abstractmethod
    def backward(self, work: Work, version: int) -> None:
        """Add the gradient of an update; `version` is that of the weights. Raises `ParityError` if the engine's
        logprobs differ."""

    @abstractmethod
    def end(self, works: Sequence[Work]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the metrics of the step by name, and its alarms."""

    def state(self) -> Mapping[str, Any]:
        """Return the state that a checkpoint stores as JSON."""
        return {}

    def state_tensors(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return the tensors that a checkpoint stores, by file name."""
        return {}

    def restore(self, saved: SavedState, directory: Path) -> None:  # noqa: B027 (not every loss has something to restore)
        """Load `state` and `state_tensors` from the checkpoint in `directory`. Raises `CheckpointError` if they do not
        fit this loss."""

    def _parts(self, experiences: Sequence[Experience]) -> list[Part]:
        """Pack sequences and, if there is a reference, add its logprobs."""
        parts = [Part(pack=pack) for pack in self._packs(experiences)]
        if (reference := self._reference) is not None:
            for part, logprobs_E in self._each(parts, lambda pack: reference.score(pack).logprobs_E):
                part.reference_E = logprobs_E
        return parts

    def _packs(self, experiences: Sequence[Experience]) -> list[Pack]:
        return self._team.packs(experiences, self._max_tokens, self._masks)

    def _balanced(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return the parts of an update with what each adds to the balance loss, if there is one."""
        if self._balance is None or not parts:
            return parts
        return [replace(part, balance=one) for part, one in zip(parts, self._balance.of(parts), strict=True)]

    def _each(
        self, parts: Sequence[Part], score: Callable[[Pack], torch.Tensor]
    ) -> Iterator[tuple[Part, torch.Tensor]]:
        """Yield each part with its score (shape E, on the CPU), computed without gradient and shared by all ranks."""
        with torch.no_grad():
            scores = self._team.map(parts, lambda part: score(part.pack).cpu(), lambda: score(IDLE))
        return zip(parts, scores, strict=True)
