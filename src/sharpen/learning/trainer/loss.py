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

import numpy as np
import torch

from sharpen.engine.token_masks import TokenMasks
from sharpen.errors import ConfigError
from sharpen.learning.trainer.checkpoint import SavedState
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.reference import FrozenCopy, Reference
from sharpen.learning.trainer.scores import to_device
from sharpen.learning.trainer.team import IDLE, Team
from sharpen.learning.trainer.work import Part, TrainingBatch, Work
from sharpen.models.balance import Balance, count_choices
from sharpen.types import Experience

# The balance loss of a mixture of experts over an update: what each of its packs adds.
#
# In: the packs of an update. Out: a `Balance` for each, which the model adds to the gradient of its routers. Means are
# over the tokens that carry loss, each at the token that predicts it: so they do not depend on how the update is split
# into packs, on shared beginnings, or on how calls were merged.
#
# Shape suffixes: N computed tokens of a pack, L layers with a router, K experts of a token, E experts of a layer.


class BalanceLoss:
    """The balance loss of a policy, added `coef` times to that of each update."""

    def __init__(self, policy: TrainedModel, coef: float, team: Team) -> None:
        """Raises `ConfigError` if the policy has no experts, `ModelError` if a loss cannot be added to its routers."""
        if policy.routing is None:
            raise ConfigError(
                f"trainer.balance_coef is {coef:g}, but this model ({policy.module.config.model_type}) has no experts: "
                "leave it out"
            )
        assert policy.adapters is None, "refused before: with adapters the routers are frozen"
        policy.routing.check_balance()
        self._policy, self._coef, self._team = policy, coef, team
        self._shape = policy.routing.shape

    def of(self, parts: Sequence[Part]) -> list[Balance]:
        """Return what each pack of an update adds. Packs without recorded experts (rows) are computed once for this,
        without gradient."""
        weights = [_weights(part.pack) for part in parts]
        num_experts = self._shape.num_experts
        known = [part.pack.routes_NLK for part in parts]
        counted = [
            count_choices(routes_NLK, weights_N, num_experts)
            for routes_NLK, weights_N in zip(known, weights, strict=True)
            if routes_NLK is not None
        ]
        unknown = [part for part, routes_NLK in zip(parts, known, strict=True) if routes_NLK is None]
        counted += self._team.map(unknown, self._count, lambda: self._policy.routes_of(IDLE))
        total = sum(weights_N.sum() for weights_N in weights)
        counts_LE = sum(counted, start=np.zeros((self._shape.num_layers, num_experts)))
        shares_LE = torch.from_numpy((counts_LE / (total * self._shape.top_k)).astype(np.float32))
        device = self._policy.device
        return [
            Balance(
                coef=self._coef,
                weights_N=to_device((weights_N / total).astype(np.float32), device),
                shares_LE=to_device(shares_LE, device),
            )
            for weights_N in weights
        ]

    def _count(self, part: Part) -> np.ndarray[Any, Any]:
        return count_choices(self._policy.routes_of(part.pack), _weights(part.pack), self._shape.num_experts)


def _weights(pack: Pack) -> np.ndarray[Any, Any]:
    """Return how many tokens with loss each computed token predicts; shape N."""
    return np.bincount(pack.predict_E, minlength=pack.num_computed_tokens)


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
        reference: Reference | None,
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

    def _all_scored(self) -> None:
        """Say that the reference has scored all of a step."""
        if isinstance(self._reference, FrozenCopy):
            self._reference.rest()

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
