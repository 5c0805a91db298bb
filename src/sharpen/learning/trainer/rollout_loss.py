"""The loss of updates on rollouts, and its gradient.

In: the sequences of each update, with advantages. Out: gradients, and the metrics of a step. Before the first update of
a step, reference, teacher and critic score every token, and advantages are computed from that. Each update scores its
packs, compares the logprobs with the engine's before any weight changes, and also adds a gradient to the critic if
there is one.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpen.engine.token_masks import TokenMasks
from sharpen.errors import ParityError
from sharpen.learning.algorithm.kl import adapt_coefficient
from sharpen.learning.algorithm.objective import ObjectiveSums, policy_objective
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.token_baseline import energies, sum_of_squares
from sharpen.learning.trainer.checkpoint import SavedState, copy_into
from sharpen.learning.trainer.credit import Credit, assign, clip_by_entropy, mask_tokens
from sharpen.learning.trainer.critic import Critic
from sharpen.learning.trainer.expert_loss import backward as backward_expert
from sharpen.learning.trainer.loss import Loss
from sharpen.learning.trainer.measured import Echoed, UpdateMetrics, sample_share, summarize
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.parity import LogprobGap, Tolerance, check_routes, check_versions, is_comparable
from sharpen.learning.trainer.reference import Reference
from sharpen.learning.trainer.reread import Readings
from sharpen.learning.trainer.scores import to_device
from sharpen.learning.trainer.teacher import Teachers
from sharpen.learning.trainer.team import IDLE, Team, backward_idle
from sharpen.learning.trainer.work import Part, TrainingBatch, Work
from sharpen.types import BoolArray, Experience, FloatArray, HalfArray

_TEACHER = "teacher"
"""The file of a checkpoint with the averaged weights that teach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackScores:
    """The results of a pack's backward pass, on the CPU."""

    logprobs_E: torch.Tensor
    moments_3E: FloatArray
    log_ratios_E: HalfArray
    clipped_E: BoolArray
    sums: ObjectiveSums
    entropy: float
    balance: float
    echo_nll: float


class RolloutLoss(Loss):
    """The loss of algorithms that learn from rollouts. It uses the policy and, as needed, the frozen reference and
    teacher, and the critic, which is trained too."""

    def __init__(
        self,
        policy: TrainedModel,
        algorithm: Algorithm,
        *,
        max_tokens: int,
        reference: Reference | None,
        critic: Critic | None,
        teachers: Teachers | None,
        tolerance: Tolerance,
        team: Team,
        masks: TokenMasks | None = None,
        balance_coef: float = 0.0,
    ) -> None:
        """Pass `reference`, `critic` and `teachers` if, and only if, the algorithm needs them. `masks` and
        `balance_coef`: see `Loss`."""
        assert (reference is not None) == algorithm.needs_reference
        assert (critic is not None) == algorithm.needs_critic
        assert (teachers is not None) == algorithm.needs_teacher
        super().__init__(
            policy, max_tokens=max_tokens, reference=reference, team=team, masks=masks, balance_coef=balance_coef
        )
        self.algorithm: Algorithm = algorithm
        self.tolerance = tolerance
        self._critic = critic
        self._teachers = teachers
        self._step: int | None = None
        self._probed = LogprobGap(0)
        self._credit = Credit()
        self._clipped: dict[str, float] = {}
        self._updates: list[UpdateMetrics] = []

    def begin(
        self, batches: Sequence[TrainingBatch], *, version: int, step: int | None, probe: Sequence[Experience]
    ) -> list[Work]:
        """See `Loss.begin`. Raises `ParityError` or `TrainingError`."""
        assert step is not None or self.algorithm.expert is None
        self._step, self._updates = step, []
        if self._policy.routing is not None:
            check_routes([*probe, *(one for batch in batches for one in batch.experiences)], self._policy.routing.shape)
        works = [self._prepare(batch) for batch in batches]
        self._all_scored()
        works = [work for work in works if work.packs]
        self._probed = self._compare(probe, works, [one for batch in batches for one in batch.experiences], version)
        parts = [part for work in works for part in work.parts]
        if self.algorithm.token_baseline:
            for part, energies_E in self._each(parts, self._energies):
                part.energies_E = energies_E
        groups = {one.rollout_id: one.group_id for batch in batches for one in batch.experiences}
        self._credit = assign(parts, self.algorithm, groups)
        self._clipped = clip_by_entropy(parts, self._policy, self.algorithm, self._team)
        self._score_proximal(works)
        return works

    def backward(self, work: Work, version: int) -> None:
        """See `Loss.backward`."""
        expert = self.algorithm.expert
        policy_weight = 1.0 if expert is None else 1.0 - expert.weight(self._step or 0)
        gap = LogprobGap(version)
        parts, masked = self._masked(self._balanced(work.parts))
        num_echoed = 0 if self.algorithm.echo is None else sum(len(part.pack.echo_targets_F) for part in parts)
        echo_weight = (self.algorithm.echo or 0.0) / max(num_echoed, 1)
        scores = self._team.map(
            parts, lambda part: self._backward(part, policy_weight, echo_weight), self._backward_idle
        )
        for part, score in zip(work.parts, scores, strict=True):
            gap.add(part.pack, score.logprobs_E)
            if part.moments_3E is None:
                part.moments_3E = score.moments_3E
            part.log_ratios_E, part.clipped_E = score.log_ratios_E, score.clipped_E
            if self.algorithm.behaviour != "none" and part.proximal_E is None:
                part.proximal_E = score.logprobs_E
        gap.check(self.tolerance)
        expert_part = critic_update = None
        if expert is not None:
            expert_part = backward_expert(self._policy, work.experts, expert, self._step or 0, self._team)
        if self._critic is not None and work.parts:
            critic_update = self._critic.backward(work.parts)
        self._updates.append(
            UpdateMetrics(
                sums=sum((score.sums for score in scores), start=ObjectiveSums.none(torch.device("cpu"))),
                entropy=sum(score.entropy for score in scores),
                gap=gap,
                sample_share=sample_share(work.parts, [score.logprobs_E for score in scores]),
                critic=critic_update,
                expert=expert_part,
                masked=masked,
                balance=None if self._balance is None else sum(score.balance for score in scores),
                echo=Echoed(echo_weight, sum(score.echo_nll for score in scores), num_echoed) if num_echoed else None,
            )
        )

    def end(self, works: Sequence[Work]) -> tuple[dict[str, float], tuple[str, ...]]:
        """See `Loss.end`. An adaptive KL coefficient is updated for the next step."""
        values, alarms = summarize(self._updates, self.algorithm, self._probed)
        packs = [part.pack for work in works for part in work.parts]
        values |= {**self._credit.metrics, **self._clipped}
        if self._policy.routing is not None and packs:
            values["rerouted_tokens"] = float(sum(pack.num_rerouted_tokens for pack in packs))
        if self.algorithm.kl_target is not None and packs:
            values["kl_coef"] = self.algorithm.kl_coef
            self._adapt_kl(values["kl_reference"] if self._credit.kl is None else self._credit.kl, packs)
        return values, alarms

    def state(self) -> dict[str, Any]:
        """See `Loss.state`."""
        adaptive = {} if self.algorithm.kl_target is None else {"kl_coef": self.algorithm.kl_coef}
        return adaptive | ({} if self._teachers is None else {"teacher": self._teachers.fingerprint()})

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """See `Loss.state_tensors`."""
        averages = {} if self._teachers is None else self._teachers.averages
        of_critic = {} if self._critic is None else self._critic.state_tensors()
        return {**of_critic, **({_TEACHER: averages} if averages else {})}

    def restore(self, saved: SavedState, directory: Path) -> None:
        """See `Loss.restore`."""
        if self._teachers is not None:
            self._teachers.check_same(saved.state.get("teacher"), directory)
            copy_into(self._teachers.averages, saved.further.get(_TEACHER, {}), directory)
        if self._critic is not None:
            self._critic.restore(saved.further, directory)
        if self.algorithm.kl_target is not None and "kl_coef" in saved.state:
            self.algorithm = replace(self.algorithm, kl_coef=float(saved.state["kl_coef"]))

    def _prepare(self, batch: TrainingBatch) -> Work:
        """Leave out sequences without a gradient, pack the rest, and score them with reference, teacher and critic."""
        kept = experiences = batch.experiences
        if not self.algorithm.trains_zero_advantages:
            kept = [experience for experience in experiences if experience.advantages_T.any()]
            if not kept and experiences:
                # All rewards are equal. One group is still computed, to compare logprobs with the engine.
                kept = [experience for experience in experiences if experience.group_id == experiences[0].group_id]
        parts = self._parts(kept)
        if self._teachers is not None:
            self._teach(parts, kept, self._teachers)
        if (critic := self._critic) is not None:
            for part, values_E in self._each(parts, critic.values):
                part.values_E = values_E
        return Work(
            parts=parts,
            experts=self._packs(batch.experts) if self.algorithm.expert is not None else [],
            skipped_tokens=_num_loss_tokens(experiences) - _num_loss_tokens(kept),
        )

    def _teach(self, parts: Sequence[Part], experiences: Sequence[Experience], teachers: Teachers) -> None:
        """Check that the teachers know all ids of these sequences' packs; add what they say of sampled tokens."""
        same = [part for part in parts if not teachers.read_anew(part.pack.teacher)]
        anew = [part for part in parts if teachers.read_anew(part.pack.teacher)]
        readings = Readings([one for one in experiences if teachers.read_anew(one.teacher)])
        read = [Part(pack=pack) for pack in self._team.packs(readings.sequences, self._max_tokens)]
        for part in (*same, *read):
            teachers.check_ids(part.pack)
        if self.algorithm.teaches_sampled:
            for part, logprobs_E in self._each(same, teachers.logprobs):
                part.teacher_E = logprobs_E
            readings.add((part.pack, logprobs_E) for part, logprobs_E in self._each(read, teachers.logprobs))
            for part in anew:
                part.teacher_E, part.chunks_E = readings.of(part.pack)

    def _compare(
        self, probe: Sequence[Experience], works: Sequence[Work], experiences: Sequence[Experience], version: int
    ) -> LogprobGap:
        """Compare logprobs with the engine if the first update has no tokens of the current version: those of the
        probe or, without one, of the step's first group with such tokens. Raises `ParityError` if they differ, or if
        there are sequences to compare but none of their tokens has the current version."""
        gap = LogprobGap(version)
        check_versions((*experiences, *probe), version)
        if not works or any(part.pack.comparable_E(version).any() for part in works[0].parts):
            return gap  # `backward` will compare these
        fresh = [one for one in experiences if is_comparable(one, version)]
        compared = probe or [one for one in fresh if one.group_id == fresh[0].group_id]
        parts = [Part(pack=pack) for pack in self._packs(compared)]
        for part, now_E in self._each(parts, lambda pack: self._policy.score(pack).logprobs_E):
            gap.add(part.pack, now_E)
        if compared and not gap.num_tokens:
            raise ParityError(
                f"none of the {_num_loss_tokens(compared)} tokens to compare with the engine is of policy version "
                f"{version}, which the engine should serve: nothing was compared or updated. Either a weight update "
                "did not reach the engine, or the engine counts versions wrongly"
            )
        gap.check(self.tolerance)
        return gap

    def _score_proximal(self, works: Sequence[Work]) -> None:
        """Compute the logprobs under the weights before the step's first update, for all later updates. Those of the
        first update come from its own forward pass, in `backward`."""
        if self.algorithm.behaviour == "none":
            return
        later = [part for work in works[1:] for part in work.parts]
        for part, now_E in self._each(later, lambda pack: self._policy.score(pack).logprobs_E):
            part.proximal_E = now_E

    def _energies(self, pack: Pack) -> torch.Tensor:
        """Return those of a pack's entries, see `algorithm.token_baseline`."""
        scores = self._policy.score(pack, statistic=sum_of_squares)
        assert scores.statistic_E is not None
        return energies(scores.logprobs_E, scores.statistic_E)

    def _masked(self, parts: Sequence[Part]) -> tuple[Sequence[Part], dict[str, float]]:
        """Return the parts of an update without the tokens that the policy loss leaves out of it, and metrics."""
        if not self.algorithm.masks_tokens or not parts:
            return parts, {}
        return mask_tokens(self._each(parts, lambda pack: self._policy.score(pack).logprobs_E), self.algorithm)

    def _adapt_kl(self, divergence: float, packs: Sequence[Pack]) -> None:
        """Set the KL coefficient of the next step from the divergence measured in this one."""
        algorithm = self.algorithm
        assert algorithm.kl_target is not None
        coefficient = adapt_coefficient(
            algorithm.kl_coef,
            divergence,
            target=algorithm.kl_target,
            horizon=algorithm.kl_horizon,
            num_rollouts=len({rollout_id for pack in packs for rollout_id in pack.rollout_ids}),
        )
        self.algorithm = replace(algorithm, kl_coef=coefficient)

    def _backward(self, part: Part, policy_weight: float, echo_weight: float) -> _PackScores:
        """Add the gradient of a pack."""
        pack, needs_entropy = part.pack, self.algorithm.needs_entropy
        scored = pack.with_echo() if echo_weight else pack
        compared, distill = None, self.algorithm.distill
        if self._teachers is not None and distill is not None and distill.of_vocabulary:
            compared = self._teachers.compared(scored, distill)
        both = self._policy.score(scored, entropy_gradient=needs_entropy, compared=compared, balance=part.balance)
        scores, echo_nll = both.first(pack.num_trained_tokens), -both.logprobs_E[pack.num_trained_tokens :].sum()
        now_E = scores.logprobs_E
        move = functools.partial(to_device, device=now_E.device)
        old_E, advantages_E, weights_E = (
            move(array).to(now_E.dtype) for array in (pack.logprobs_E, pack.advantages_E, pack.weights_E)
        )
        if pack.truncated_E.any():  # their records are of an unknown distribution: no ratio
            old_E = torch.where(move(pack.truncated_E), now_E.detach(), old_E)
        loss, sums, tokens = policy_objective(
            self.algorithm,
            now_E,
            old_E,
            advantages_E,
            weights_E,
            None if part.reference_E is None else move(part.reference_E),
            scores.entropy_E if needs_entropy else None,
            move(pack.call_numbers_E) if self.algorithm.by_call else None,
            None if part.proximal_E is None else move(part.proximal_E),
            policy_weight,
            scores.divergence_E,
        )
        (loss + echo_weight * echo_nll).backward()  # type: ignore[no-untyped-call]
        entropy_E = scores.entropy_E.detach()
        return _PackScores(
            logprobs_E=now_E.detach().cpu(),
            moments_3E=torch.stack([entropy_E, scores.varentropy_E, scores.cumulative_E]).float().cpu().numpy(),
            log_ratios_E=_log_ratios(pack, tokens.log_ratios_E),
            clipped_E=part.left_out_with(tokens.clipped_E.cpu().numpy()),
            sums=sums.cpu(),
            entropy=float(entropy_E.sum()),
            balance=0.0 if part.balance is None else part.balance.value,
            echo_nll=float(echo_nll.detach()),
        )

    def _backward_idle(self) -> None:
        """Make the pass of a rank that has no pack left."""
        if self._teachers is not None and (distill := self.algorithm.distill) is not None and distill.of_vocabulary:
            self._teachers.compared(IDLE, distill)
        backward_idle(self._policy)


def _log_ratios(pack: Pack, log_ratios_E: torch.Tensor) -> HalfArray:
    """Return the log ratios of a pack's entries; NaN where the record is of an unknown distribution."""
    halves_E: HalfArray = log_ratios_E.to(torch.float16).cpu().numpy()
    return np.where(pack.truncated_E, np.float16(np.nan), halves_E)


def _num_loss_tokens(experiences: Iterable[Experience]) -> int:
    return sum(int(np.count_nonzero(experience.loss_mask_T)) for experience in experiences)
