"""From batches of experiences to updated weights.

In: the `Batch`es of a step, one for each minibatch. Out: `StepMetrics`, and new weights as `state_tensors()`. An update
packs its sequences into micro-batches, scores them (and the reference model does, where the algorithm asks), compares
the logprobs with the engine's records, and makes one optimizer step (of the critic too, where there is one). Since the
weights of the loss hold the normalization of the whole update, the gradients of its micro-batches simply add up.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from sharpen.algorithm.kl import adapted
from sharpen.algorithm.objective import ObjectiveSums, policy_objective
from sharpen.algorithm.presets import Algorithm
from sharpen.config.trainer import CriticConfig, TrainerConfig
from sharpen.errors import ParityError
from sharpen.trainer import checkpoint
from sharpen.trainer.credit import Part, assign
from sharpen.trainer.critic import Critic
from sharpen.trainer.entropy_clip import clip_by_entropy
from sharpen.trainer.expert import backward as backward_expert
from sharpen.trainer.lora import adapters_line
from sharpen.trainer.measured import StepMetrics, Update, sample_share, summarize
from sharpen.trainer.model import DType, Scorer, TrainedModel, resolve_dtype
from sharpen.trainer.optimizer import Optimizer
from sharpen.trainer.packing import Pack
from sharpen.trainer.parity import LogprobGap, Tolerance, check_versions
from sharpen.trainer.roles import load_roles, load_teacher, resolve_device
from sharpen.trainer.rounding import Rounding, measure
from sharpen.trainer.scores import to_device
from sharpen.trainer.step_start import StepStart
from sharpen.trainer.teacher import Teacher
from sharpen.trainer.team import IDLE, Team, backward_nothing
from sharpen.types import Experience


class Batch(Protocol):
    """What one update trains on: sequences with advantages, and weights normalized over the whole update."""

    @property
    def experiences(self) -> Sequence[Experience]:
        """All sequences of the update."""

    @property
    def experts(self) -> Sequence[Experience]:
        """Those of an expert, beside them; looked at only if the algorithm has an expert's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """What the backward pass of a pack found, on the CPU."""

    logprobs_E: torch.Tensor
    sums: ObjectiveSums
    entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A batch, packed, with what is known of each pack beside the records."""

    parts: list[Part]
    experts: list[Pack]
    skipped_tokens: int


class Trainer:
    """Owns the trained weights, their optimizer, and the frozen reference and teacher. `version` counts the updates the
    policy had."""

    def __init__(
        self,
        policy: TrainedModel,
        *,
        algorithm: Algorithm,
        config: TrainerConfig,
        learning_rate: float,
        planned_updates: int,
        reference: Scorer | None = None,
        critic: Critic | None = None,
        teacher: Teacher | None = None,
        tolerance: Tolerance | None = None,
        rounding: Rounding | None = None,
        team: Team | None = None,
    ) -> None:
        """Train `policy`. `reference`, `critic` and `teacher` must be given exactly if the algorithm needs one; all are
        divided already where `team` has several ranks. What `rounding` was measured to be is the tolerance, where none
        is given."""
        assert (reference is not None) == algorithm.needs_reference
        assert (critic is not None) == algorithm.needs_critic
        assert (teacher is not None) == algorithm.needs_teacher
        self.version = 0
        self.policy = policy
        self._optimizer = Optimizer(
            policy.parameters(), config, peak_learning_rate=learning_rate, planned_updates=planned_updates
        )
        self._algorithm = algorithm
        self._config = config
        self._reference = reference
        self._critic = critic
        self._teacher = teacher
        self.rounding = rounding
        measured = None if rounding is None else rounding.rounding
        self._tolerance = tolerance or Tolerance.of(policy.compute_dtype, measured)
        self._team = team or Team()
        self._start = StepStart(
            [self._optimizer, *([] if critic is None else [critic.optimizer])],
            num_updates=config.num_minibatches * config.epochs,
            num_ranks=self._team.size,
        )

    @classmethod
    def from_pretrained(
        cls,
        model_path: str | Path,
        *,
        algorithm: Algorithm,
        config: TrainerConfig,
        learning_rate: float,
        planned_updates: int,
        device: str | torch.device = "auto",
        seed: int = 0,
        tolerance: Tolerance | None = None,
        critic: CriticConfig | None = None,
        teacher_path: str | Path | None = None,
        team: Team | None = None,
        probe: Sequence[Experience] = (),
        engine_dtype: DType = "auto",
    ) -> Trainer:
        """Load a model directory as policy, and again as the frozen reference if the algorithm has a KL term (with
        adapters, the policy without them is the reference), and as the critic's start if it has a critic. The model
        in `teacher_path` is the teacher, if the algorithm has one; its vocabulary must be the policy's.

        `planned_updates` is what the learning-rate schedule spans. Each rank of a `team` calls this, with its own
        `device`. `probe` is what an engine with the same weights, which computes in `engine_dtype`, continued some
        prompts by: by it rounding is measured, where there is any. Raises `ModelError` for architectures not supported,
        `ParityError` if that engine serves another model.
        """
        torch.manual_seed(seed)
        place, team, rounding = resolve_device(device), team or Team(), None

        def look(policy: TrainedModel) -> None:
            nonlocal rounding
            dtype = resolve_dtype(engine_dtype, place)
            most = config.max_tokens_per_micro_batch
            rounding = measure(policy, probe, engine_dtype=dtype, max_tokens=most, team=team)

        needs_reference = algorithm.needs_reference
        policy, reference = load_roles(model_path, config, place, team, needs_reference=needs_reference, look=look)
        value_model = None
        if algorithm.needs_critic:
            value_model = Critic.load(
                model_path,
                config=critic or CriticConfig(),
                trainer_config=config,
                planned_updates=planned_updates,
                device=torch.device("cpu") if config.cpu_offload else place,
                team=team,
            )
        teacher = None
        if algorithm.needs_teacher:
            assert teacher_path is not None, f"{algorithm.name} needs a teacher"
            teacher = load_teacher(teacher_path, config, place, team)
        return cls(
            policy,
            algorithm=algorithm,
            config=config,
            learning_rate=learning_rate,
            planned_updates=planned_updates,
            reference=reference,
            critic=value_model,
            teacher=teacher,
            tolerance=tolerance,
            rounding=rounding,
            team=team,
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """What to tell the user of the model: how much of it is trained, with which kernels."""
        measured = self.rounding.line if self.rounding is not None else ""
        lines = (adapters_line(self.policy), *self.policy.kernels, self._start.line, measured)
        return tuple(line for line in lines if line)

    def train_step(
        self, batches: Sequence[Batch], *, step: int | None = None, probe: Sequence[Experience] = ()
    ) -> StepMetrics:
        """One update for each batch, `epochs` times over. `step` is the number of the step, the first being 1; it must
        be given if the algorithm has an expert's part, whose weight depends on it. `probe` holds sequences of the
        current version, which are compared with the engine's records where the first update trains on older ones alone.

        A batch without a loss token makes no update. Raises `ParityError` or `TrainingError` before the update
        concerned: weights and version stay what they were; `back_to` undoes the updates before it.
        """
        start = time.perf_counter()
        assert step is not None or self._algorithm.expert is None
        works = [self._prepare(batch) for batch in batches]
        works = [work for work in works if work.parts or work.experts]
        probed = self._compare(probe, works, [one for batch in batches for one in batch.experiences])
        parts = [part for work in works for part in work.parts]
        credit = assign(parts, self._algorithm)
        clipped = clip_by_entropy(parts, self.policy, self._algorithm, self._team)
        self._score_proximal(works)
        self._start.begin(self.version, len(works) * self._config.epochs, self._algorithm)
        updates = [self._update(work, step or 0) for _ in range(self._config.epochs) for work in works]
        packs = [part.pack for part in parts]
        values, alarms = summarize(updates, self._algorithm, probed)
        values |= {**credit.metrics, **clipped}
        if self._algorithm.kl_target is not None and packs:
            values["kl_coef"] = self._algorithm.kl_coef
            self._adapt_kl(values["kl_reference"] if credit.kl is None else credit.kl, packs)
        packs += [pack for work in works for pack in work.experts]
        return StepMetrics(
            version=self.version,
            num_updates=len(updates),
            trained_tokens=sum(pack.num_trained_tokens for pack in packs),
            computed_tokens=sum(pack.num_computed_tokens for pack in packs),
            sequence_tokens=sum(pack.num_sequence_tokens for pack in packs),
            skipped_tokens=sum(work.skipped_tokens for work in works),
            seconds=time.perf_counter() - start,
            values=values,
            alarms=alarms,
        )

    def back_to(self, version: int) -> bool:
        """Have the weights of this version, whole, with all that belongs to them: as they are, or as they were when the
        last step began, if it kept them. False, with nothing changed, where neither is so."""
        if self.version == version and self._start.is_whole():
            return True
        went, algorithm = self._start.go_back(version)
        if went:
            self.version, self._algorithm = version, algorithm
        return went

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The weights to act with, by their Hugging Face names; see `TrainedModel.state_tensors`."""
        return self.policy.state_tensors()

    def close(self) -> None:
        """Nothing is held that the process does not free."""

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint; `position` is the caller's own JSON, given back by `restore`.

        Raises `CheckpointError`; then what was at `directory` stays, and nothing else is left behind.
        """
        adaptive = {} if self._algorithm.kl_target is None else {"kl_coef": self._algorithm.kl_coef}
        taught = {} if self._teacher is None else {"teacher": self._teacher.fingerprint()}
        checkpoint.save(
            directory,
            policy=self.policy,
            optimizer_tensors=self._optimizer.state_tensors(),
            state={"version": self.version, "position": dict(position), **adaptive, **taught},
            further=self._critic.state_tensors() if self._critic is not None else {},
            team=self._team,
        )

    def restore(self, directory: Path) -> dict[str, Any]:
        """Continue from a checkpoint of the same model: weights, optimizer, critic, random state, version, adapted KL
        coefficient.

        Returns its `position`. Raises `CheckpointError` if it is not whole, or not of this model and teacher.
        """
        saved = checkpoint.load(directory)
        if self._teacher is not None:
            self._teacher.check_same(saved.state.get("teacher"), directory)
        with self._start.update():
            if self._critic is not None:
                self._critic.restore(saved.further, directory)
            checkpoint.restore_policy(self.policy, saved, directory)
            self._optimizer.load_state_tensors(saved.optimizer_tensors)
            self.version = int(saved.state["version"])
        checkpoint.set_random_state(saved.random_state)
        if self._algorithm.kl_target is not None and "kl_coef" in saved.state:
            self._algorithm = replace(self._algorithm, kl_coef=float(saved.state["kl_coef"]))
        position: dict[str, Any] = saved.state["position"]
        return position

    def _prepare(self, batch: Batch) -> _Work:
        """Leave out sequences that cannot change the gradient, pack the rest, score it with reference, teacher and
        critic."""
        kept = experiences = batch.experiences
        if not self._algorithm.trains_zero_advantages:
            kept = [experience for experience in experiences if experience.advantages_T.any()]
            if not kept and experiences:
                # All rewards are the same. One group is computed nevertheless, for the comparison with the engine.
                kept = [experience for experience in experiences if experience.group_id == experiences[0].group_id]
        parts = [Part(pack=packed) for packed in self._packs(kept)]
        if (reference := self._reference) is not None:
            for part, logprobs_E in self._each(parts, lambda pack: reference.score(pack).logprobs_E):
                part.reference_E = logprobs_E
        if (teacher := self._teacher) is not None:
            for part in parts:
                teacher.check_ids(part.pack)
            if self._algorithm.teaches_sampled:
                for part, logprobs_E in self._each(parts, teacher.logprobs):
                    part.teacher_E = logprobs_E
        if (critic := self._critic) is not None:
            for part, values_E in self._each(parts, critic.values):
                part.values_E = values_E
        experts = self._packs(batch.experts) if self._algorithm.expert is not None else []
        skipped_tokens = _num_loss_tokens(experiences) - _num_loss_tokens(kept)
        return _Work(parts=parts, experts=experts, skipped_tokens=skipped_tokens)

    def _compare(
        self, probe: Sequence[Experience], works: Sequence[_Work], experiences: Sequence[Experience]
    ) -> LogprobGap:
        """Score the probe if nothing in the first update is of the current version; without one a fresh group of the
        step, if it has any. Raises `ParityError`, also if nothing comes to be compared that should."""
        gap = LogprobGap(self.version)
        check_versions((*experiences, *probe), self.version)
        if not works or any((part.pack.versions_E == self.version).any() for part in works[0].parts):
            return gap  # the first update compares its own
        fresh = [one for one in experiences if (one.versions_T[one.loss_mask_T] == self.version).any()]
        compared = probe or [one for one in fresh if one.group_id == fresh[0].group_id]
        parts = [Part(pack=packed) for packed in self._packs(compared)]
        for part, now_E in self._each(parts, lambda pack: self.policy.score(pack).logprobs_E):
            gap.add(part.pack, now_E)
        if compared and not gap.num_tokens:
            raise ParityError(
                f"none of the {_num_loss_tokens(compared)} tokens to compare with the engine is of policy version "
                f"{self.version}, though it was to serve that: nothing was compared, and nothing was updated. A weight "
                "update did not reach the engine, or it counts versions wrongly"
            )
        gap.check(self._tolerance)
        return gap

    def _packs(self, experiences: Sequence[Experience]) -> list[Pack]:
        return self._team.packs(experiences, self._config.max_tokens_per_micro_batch)

    def _each(
        self, parts: Sequence[Part], score: Callable[[Pack], torch.Tensor]
    ) -> Iterator[tuple[Part, torch.Tensor]]:
        """Each part with its score (shape E) on the CPU, computed without gradient by the rank that has it."""
        with torch.no_grad():
            found = self._team.map(parts, lambda part: score(part.pack).cpu(), lambda: score(IDLE))
        return zip(parts, found, strict=True)

    def _score_proximal(self, works: Sequence[_Work]) -> None:
        """Logprobs of the weights before the step's first update. The first update computes its own, which are kept
        for later epochs; with one update a step there is nothing to do."""
        if self._algorithm.behaviour == "none":
            return
        later = [part for work in works[1:] for part in work.parts]
        for part, now_E in self._each(later, lambda pack: self.policy.score(pack).logprobs_E):
            part.proximal_E = now_E

    def _adapt_kl(self, found: float, packs: Sequence[Pack]) -> None:
        """Set the coefficient of the KL term for the next step."""
        algorithm = self._algorithm
        assert algorithm.kl_target is not None
        num_rollouts = len({rollout_id for pack in packs for rollout_id in pack.rollout_ids})
        coefficient = adapted(
            algorithm.kl_coef,
            found,
            target=algorithm.kl_target,
            horizon=algorithm.kl_horizon,
            num_rollouts=num_rollouts,
        )
        self._algorithm = replace(algorithm, kl_coef=coefficient)

    def _update(self, work: _Work, step: int) -> Update:
        expert = self._algorithm.expert
        policy_weight = 1.0 if expert is None else 1.0 - expert.weight(step)
        critic = self._critic if work.parts else None
        self._optimizer.zero_grad()
        if critic is not None:
            critic.zero_grad()
        gap = LogprobGap(self.version)
        found = self._team.map(work.parts, lambda part: self._backward(part, policy_weight), self._backward_nothing)
        for part, one in zip(work.parts, found, strict=True):
            gap.add(part.pack, one.logprobs_E)
            if self._algorithm.behaviour != "none" and part.proximal_E is None:
                part.proximal_E = one.logprobs_E
        gap.check(self._tolerance)
        taught = None if expert is None else backward_expert(self.policy, work.experts, expert, step, self._team)
        critic_update = None
        if critic is not None:
            critic.backward(work.parts)
        grad_norm = self._optimizer.norm(self.version)
        critic_norm = None if critic is None else critic.norm(self.version)  # both are updated, or none
        with self._start.update():
            rate = self._optimizer.apply(self.version, grad_norm)
            if critic is not None and critic_norm is not None:
                critic_update = critic.apply(self.version, critic_norm)
            self.version += 1
        sums = ObjectiveSums.none(torch.device("cpu"))
        for one in found:
            sums = sums + one.sums
        return Update(
            sums=sums,
            entropy=sum(one.entropy for one in found),
            gap=gap,
            sample_share=sample_share(work.parts, [one.logprobs_E for one in found]),
            grad_norm=float(grad_norm),
            learning_rate=rate,
            critic=critic_update,
            expert=taught,
        )

    def _backward_nothing(self) -> None:
        """The pass of a rank that has no pack left."""
        if self._teacher is not None and (distill := self._algorithm.distill) is not None and distill.of_vocabulary:
            self._teacher.compared(IDLE, distill)
        backward_nothing(self.policy)

    def _backward(self, part: Part, policy_weight: float) -> _Scored:
        """Add a pack's gradient."""
        pack, needs_entropy = part.pack, self._algorithm.needs_entropy
        compared, distill = None, self._algorithm.distill
        if self._teacher is not None and distill is not None and distill.of_vocabulary:
            compared = self._teacher.compared(pack, distill)
        scores = self.policy.score(pack, entropy_gradient=needs_entropy, compared=compared)
        now_E = scores.logprobs_E
        there = functools.partial(to_device, device=now_E.device)
        old_E, advantages_E, weights_E = (
            there(array).to(now_E.dtype) for array in (pack.logprobs_E, pack.advantages_E, pack.weights_E)
        )
        loss, sums = policy_objective(
            self._algorithm,
            now_E,
            old_E,
            advantages_E,
            weights_E,
            None if part.reference_E is None else there(part.reference_E),
            scores.entropy_E if needs_entropy else None,
            there(pack.call_numbers_E) if self._algorithm.by_call else None,
            None if part.proximal_E is None else there(part.proximal_E),
            policy_weight,
            scores.divergence_E,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        return _Scored(logprobs_E=now_E.detach().cpu(), sums=sums.cpu(), entropy=float(scores.entropy_E.detach().sum()))


def _num_loss_tokens(experiences: Iterable[Experience]) -> int:
    return sum(int(np.count_nonzero(experience.loss_mask_T)) for experience in experiences)
