"""The loss of updates on rows, and its gradient.

In: the sequences of each update. Out: gradients, and `UpdateLoss`. Since nobody sampled these tokens there is no ratio
and nothing to compare with an engine. A pair is never split over packs, because its loss needs both of its answers.

Shape suffixes: E loss entries of a pack, N rows (or pairs) of a pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from sharpen.algorithm.supervised import SupervisedAlgorithm, cross_entropy, margins
from sharpen.trainer.loss import Loss
from sharpen.trainer.model import Scorer, TrainedModel
from sharpen.trainer.packing import Pack, pack
from sharpen.trainer.scores import to_device
from sharpen.trainer.team import IDLE, Team, backward_nothing
from sharpen.trainer.work import Part, TrainingBatch, Work
from sharpen.types import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLoss:
    """Losses of some rows: their sum with their weights, each row's (or pair's) part of it by id, and the margin of
    each pair: the log ratio that its better answer gained on the worse one."""

    loss: float
    rows: Mapping[str, float]
    margins: Mapping[str, float]


class RowLoss(Loss):
    """Needs nothing beside the policy but the frozen reference."""

    def __init__(
        self,
        policy: TrainedModel,
        algorithm: SupervisedAlgorithm,
        *,
        max_tokens: int,
        reference: Scorer | None,
        team: Team,
    ) -> None:
        """`reference` must be given exactly if the algorithm needs one."""
        assert (reference is not None) == algorithm.needs_reference
        super().__init__(policy, max_tokens=max_tokens, reference=reference, team=team)
        self.algorithm = algorithm
        self._losses: list[UpdateLoss] = []

    def begin(
        self, batches: Sequence[TrainingBatch], *, version: int, step: int | None, probe: Sequence[Experience]
    ) -> list[Work]:
        """See `Loss.begin`."""
        assert not probe, "no engine sampled rows"
        self._losses = []
        return [Work(parts=self._parts(batch.experiences)) for batch in batches if batch.experiences]

    def backward(self, work: Work, version: int) -> None:
        """See `Loss.backward`."""
        self._losses.append(self._compute(work.parts, backward=True))

    def end(self, works: Sequence[Work]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Metrics of the step by name: `loss` is the mean over its updates; `accuracy` the share of pairs whose better
        answer gained on the worse one, and `margin` their mean. There are no alarms."""
        if not self._losses:
            return {}, ()
        values = {"loss": sum(losses.loss for losses in self._losses) / len(self._losses)}
        of_pairs = {name: margin for losses in self._losses for name, margin in losses.margins.items()}
        if of_pairs:
            values["accuracy"] = sum(margin > 0 for margin in of_pairs.values()) / len(of_pairs)
            values["margin"] = sum(of_pairs.values()) / len(of_pairs)
        return values, ()

    def measure(self, experiences: Sequence[Experience]) -> UpdateLoss:
        """The losses of rows, without a gradient."""
        return self._compute(self._parts(experiences), backward=False)

    def _packs(self, experiences: Sequence[Experience]) -> list[Pack]:
        if self.algorithm.pair_loss is None:
            return self._team.packs(experiences, self._max_tokens)
        return [one for unit in _units(experiences, self._max_tokens) for one in pack(unit, _num_tokens(unit))]

    def _compute(self, parts: Sequence[Part], *, backward: bool) -> UpdateLoss:
        """The losses of an update; its gradient is added if asked for."""

        def compute(part: Part) -> UpdateLoss:
            with torch.set_grad_enabled(backward):
                loss, losses = self.of_part(part)
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            return losses

        def idle() -> None:
            if backward:
                backward_nothing(self._policy)
                return
            with torch.no_grad():
                self._policy.score(IDLE)

        found = self._team.map(parts, compute, idle)
        rows: dict[str, float] = {}
        for losses in found:  # a row's sequences may be in several packs
            rows |= {name: rows.get(name, 0.0) + loss for name, loss in losses.rows.items()}
        return UpdateLoss(
            loss=sum(losses.loss for losses in found),
            rows=rows,
            margins={name: margin for losses in found for name, margin in losses.margins.items()},
        )

    def of_part(self, part: Part) -> tuple[torch.Tensor, UpdateLoss]:
        """The pack's part of the update's loss, a scalar that carries gradient; and the same as numbers."""
        logprobs_E = self._policy.score(part.pack).logprobs_E
        weights_E = to_device(part.pack.weights_E, logprobs_E.device).to(logprobs_E.dtype)
        present, numbers = np.unique(part.pack.rollouts_E, return_inverse=True)
        names = [part.pack.rollout_ids[number] for number in present]
        rows_E = to_device(numbers, logprobs_E.device)
        none_N = weights_E.new_zeros(len(present))
        if self.algorithm.pair_loss is None:
            losses_N = none_N.index_add(0, rows_E, -(weights_E * logprobs_E).detach())
            loss, of_pairs = cross_entropy(logprobs_E, weights_E), dict[str, float]()
        else:
            assert part.reference_E is not None
            reference_E = to_device(part.reference_E, logprobs_E.device)
            sides_E = to_device(part.pack.advantages_E, logprobs_E.device).to(logprobs_E.dtype)
            margins_N = margins(logprobs_E, reference_E, sides_E, rows_E, len(present))
            weights_N = none_N.index_add(0, rows_E, weights_E)
            losses_N = weights_N * self.algorithm.pair_loss(margins_N, **self.algorithm.pair_loss_args)
            loss, of_pairs = losses_N.sum(), dict(zip(names, margins_N.tolist(), strict=True))
        of_rows = dict(zip(names, losses_N.tolist(), strict=True))
        return loss, UpdateLoss(loss=float(loss.detach()), rows=of_rows, margins=of_pairs)


def _units(experiences: Sequence[Experience], limit: int) -> Iterable[list[Experience]]:
    """Whole pairs in their order, as many together as have at most `limit` tokens unshared (one may have more)."""
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
