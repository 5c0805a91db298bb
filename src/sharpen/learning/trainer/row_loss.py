"""The loss of updates on rows, and its gradient.

In: the sequences of each update. Out: gradients, and `UpdateLoss`. No engine sampled these tokens, so there are no
probability ratios and nothing to compare. The two answers of a pair are always in the same pack: its loss needs both.

Shape suffixes: E loss entries of a pack, N rows (or pairs) of a pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from sharpen.learning.algorithm.kl import estimator
from sharpen.learning.algorithm.supervised import SupervisedAlgorithm, cross_entropy, margins
from sharpen.learning.trainer.loss import Loss
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Pack, pack
from sharpen.learning.trainer.reference import Reference
from sharpen.learning.trainer.scores import to_device
from sharpen.learning.trainer.team import IDLE, Team, backward_idle
from sharpen.learning.trainer.work import Part, TrainingBatch, Work
from sharpen.types import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLoss:
    """The losses of some rows. `loss` is their weighted sum plus `kl_loss`, the KL term of pairs. `rows` is the share
    of each row (or pair) in that sum, by id. `kl` is the sum of the divergence's estimates over `num_tokens` tokens.
    `margins` has for each pair the log ratio of the better answer less that of the worse one. `balance` is the balance
    loss of a mixture of experts, which `loss` does not include."""

    loss: float
    kl_loss: float
    kl: float
    num_tokens: int
    rows: Mapping[str, float]
    margins: Mapping[str, float]
    balance: float = 0.0


class RowLoss(Loss):
    """The loss of supervised algorithms. It uses the policy and, for pairs, the frozen reference."""

    def __init__(
        self,
        policy: TrainedModel,
        algorithm: SupervisedAlgorithm,
        *,
        max_tokens: int,
        reference: Reference | None,
        team: Team,
        balance_coef: float = 0.0,
    ) -> None:
        """Pass `reference` if, and only if, the algorithm needs one. `balance_coef`: see `Loss`."""
        assert (reference is not None) == algorithm.needs_reference
        super().__init__(policy, max_tokens=max_tokens, reference=reference, team=team, balance_coef=balance_coef)
        self.algorithm = algorithm
        self._losses: list[UpdateLoss] = []

    def begin(
        self, batches: Sequence[TrainingBatch], *, version: int, step: int | None, probe: Sequence[Experience]
    ) -> list[Work]:
        """See `Loss.begin`."""
        assert not probe, "rows have no engine to compare with"
        self._losses = []
        works = [Work(parts=self._parts(batch.experiences)) for batch in batches if batch.experiences]
        self._all_scored()
        return works

    def backward(self, work: Work, version: int) -> None:
        """See `Loss.backward`."""
        self._losses.append(self._compute(self._balanced(work.parts), backward=True))

    def end(self, works: Sequence[Work]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the metrics of the step by name, and no alarms. `loss` and `kl_loss` are means over updates,
        `kl_reference` a mean over tokens, `accuracy` the share of pairs with a positive margin, `margin` the mean
        margin."""
        if not self._losses:
            return {}, ()
        values = {"loss": sum(losses.loss for losses in self._losses) / len(self._losses)}
        pair_margins = {name: margin for losses in self._losses for name, margin in losses.margins.items()}
        if pair_margins:
            values["accuracy"] = sum(margin > 0 for margin in pair_margins.values()) / len(pair_margins)
            values["margin"] = sum(pair_margins.values()) / len(pair_margins)
        if self._balance is not None:
            values["balance_loss"] = sum(losses.balance for losses in self._losses) / len(self._losses)
        if self.algorithm.kl != "none":
            values["kl_loss"] = sum(losses.kl_loss for losses in self._losses) / len(self._losses)
            num_tokens = sum(losses.num_tokens for losses in self._losses)
            values["kl_reference"] = sum(losses.kl for losses in self._losses) / max(num_tokens, 1)
        return values, ()

    def measure(self, experiences: Sequence[Experience]) -> UpdateLoss:
        """Return the losses of rows without computing a gradient."""
        return self._compute(self._parts(experiences), backward=False)

    def _packs(self, experiences: Sequence[Experience]) -> list[Pack]:
        if self.algorithm.pair_loss is None:
            return self._team.packs(experiences, self._max_tokens)
        return [one for unit in _units(experiences, self._max_tokens) for one in pack(unit, _num_tokens(unit))]

    def _compute(self, parts: Sequence[Part], *, backward: bool) -> UpdateLoss:
        """Return the losses of an update; with `backward`, also add its gradient."""
        num_tokens = sum(part.pack.num_trained_tokens for part in parts)

        def compute(part: Part) -> UpdateLoss:
            with torch.set_grad_enabled(backward):
                loss, losses = self._part_loss(part, num_tokens)
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            return losses

        def idle() -> None:
            if backward:
                backward_idle(self._policy)
                return
            with torch.no_grad():
                self._policy.score(IDLE)

        results = self._team.map(parts, compute, idle)
        rows: dict[str, float] = {}
        for losses in results:  # the sequences of a row may be in several packs
            rows |= {name: rows.get(name, 0.0) + loss for name, loss in losses.rows.items()}
        return UpdateLoss(
            loss=sum(losses.loss for losses in results),
            kl_loss=sum(losses.kl_loss for losses in results),
            kl=sum(losses.kl for losses in results),
            num_tokens=num_tokens,
            rows=rows,
            margins={name: margin for losses in results for name, margin in losses.margins.items()},
            balance=sum(losses.balance for losses in results),
        )

    def _part_loss(self, part: Part, num_tokens: int) -> tuple[torch.Tensor, UpdateLoss]:
        """Return a pack's share of the loss of an update with `num_tokens` tokens: as a scalar tensor with gradient,
        and as numbers."""
        logprobs_E = self._policy.score(part.pack, balance=part.balance).logprobs_E
        weights_E = to_device(part.pack.weights_E, logprobs_E.device).to(logprobs_E.dtype)
        present, numbers = np.unique(part.pack.rollouts_E, return_inverse=True)
        names = [part.pack.rollout_ids[number] for number in present]
        rows_E = to_device(numbers, logprobs_E.device)
        zeros_N = weights_E.new_zeros(len(present))
        kl = kl_loss = weights_E.new_zeros(())
        if self.algorithm.pair_loss is None:
            losses_N = zeros_N.index_add(0, rows_E, -(weights_E * logprobs_E).detach())
            loss, pair_margins = cross_entropy(logprobs_E, weights_E), dict[str, float]()
        else:
            assert part.reference_E is not None
            reference_E = to_device(part.reference_E, logprobs_E.device)
            sides_E = to_device(part.pack.advantages_E, logprobs_E.device).to(logprobs_E.dtype)
            margins_N = margins(logprobs_E, reference_E, sides_E, rows_E, len(present))
            weights_N = zeros_N.index_add(0, rows_E, weights_E)
            losses_N = weights_N * self.algorithm.pair_loss(margins_N, **self.algorithm.pair_loss_args)
            loss, pair_margins = losses_N.sum(), dict(zip(names, margins_N.tolist(), strict=True))
            if self.algorithm.kl != "none":
                kl = estimator(self.algorithm.kl)(logprobs_E, reference_E, logprobs_E.detach()).sum()
                kl_loss = self.algorithm.kl_coef / num_tokens * kl
        rows = dict(zip(names, losses_N.tolist(), strict=True))
        loss = loss + kl_loss
        return loss, UpdateLoss(
            loss=float(loss.detach()),
            kl_loss=float(kl_loss.detach()),
            kl=float(kl.detach()),
            num_tokens=part.pack.num_trained_tokens,
            rows=rows,
            margins=pair_margins,
            balance=0.0 if part.balance is None else part.balance.value,
        )


def _units(experiences: Sequence[Experience], limit: int) -> Iterable[list[Experience]]:
    """Group whole pairs, in order, up to `limit` tokens without sharing prefixes; a longer pair is a unit by itself."""
    unit: list[Experience] = []
    for _, members in groupby(experiences, key=lambda experience: experience.group_id):
        pair = list(members)
        if unit and _num_tokens(unit) + _num_tokens(pair) > limit:
            yield unit
            unit = []
        unit += pair
    if unit:
        yield unit


def _num_tokens(experiences: Sequence[Experience]) -> int:
    return sum(len(experience.ids_T) for experience in experiences)
