"""From batches of experiences to updated weights.

In: the `Batch`es of a step, one for each minibatch. Out: `StepMetrics`, and new weights as `state_tensors()`. An update
packs its sequences into micro-batches, scores them (and the reference model does, where the algorithm asks), compares
the logprobs with the engine's records, and makes one optimizer step (of the critic too, where there is one). Since the
weights of the loss hold the normalization of the whole update, the gradients of its micro-batches simply add up.

Shape suffixes: E loss entries of a pack, N rollouts of an update.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from agenttune.algorithm.kl import adapted
from agenttune.algorithm.objective import (
    ObjectiveSums,
    effective_sample_share,
    policy_objective,
    sample_share_alarm,
    sequence_log_ratios,
)
from agenttune.algorithm.presets import Algorithm
from agenttune.config.run import CriticConfig, TrainerConfig
from agenttune.trainer import checkpoint
from agenttune.trainer.credit import Part, assign
from agenttune.trainer.critic import Critic, CriticUpdate
from agenttune.trainer.model import TrainedModel
from agenttune.trainer.optimizer import Optimizer
from agenttune.trainer.packing import IndexArray, Pack, pack
from agenttune.trainer.parity import LogprobGap, Tolerance
from agenttune.types import Experience


class Batch(Protocol):
    """What one update trains on: sequences with advantages, and weights normalized over the whole update."""

    @property
    def experiences(self) -> Sequence[Experience]:
        """All sequences of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What a training step did.

    `version` is the policy version after it. `values` are numbers to log: means over the step's loss tokens and
    updates. Token counts are those of one pass over the data: `trained_tokens` carry loss, `computed_tokens` went
    through the model, `sequence_tokens` would have without sharing, `skipped_tokens` (loss tokens) had no gradient to
    give. `alarms` are sentences for people.
    """

    version: int
    num_updates: int
    trained_tokens: int
    computed_tokens: int
    sequence_tokens: int
    skipped_tokens: int
    seconds: float
    values: Mapping[str, float]
    alarms: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, float]:
        """All numbers by name."""
        names = ("version", "num_updates", "trained_tokens", "computed_tokens", "sequence_tokens", "skipped_tokens")
        return {name: getattr(self, name) for name in names} | {"seconds": self.seconds} | dict(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A batch, packed, with what is known of each pack beside the records."""

    parts: list[Part]
    skipped_tokens: int

    @property
    def num_entries(self) -> int:
        """Loss entries of the update."""
        return sum(part.pack.num_trained_tokens for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """What one update measured."""

    sums: ObjectiveSums
    entropy: float
    gap: LogprobGap
    sample_share: float
    grad_norm: float
    learning_rate: float
    critic: CriticUpdate | None


class Trainer:
    """Owns the trained weights, their optimizer, and the frozen reference. `version` counts the updates they had."""

    def __init__(
        self,
        policy: TrainedModel,
        *,
        algorithm: Algorithm,
        config: TrainerConfig,
        learning_rate: float,
        planned_updates: int,
        reference: TrainedModel | None = None,
        critic: Critic | None = None,
        tolerance: Tolerance | None = None,
    ) -> None:
        """Train `policy`. `reference` and `critic` must be given exactly if the algorithm needs one."""
        assert (reference is not None) == algorithm.needs_reference
        assert (critic is not None) == algorithm.needs_critic
        self.version = 0
        self.policy = policy
        self._optimizer = Optimizer(
            policy.parameters(), config, peak_learning_rate=learning_rate, planned_updates=planned_updates
        )
        self._algorithm = algorithm
        self._config = config
        self._reference = reference
        self._critic = critic
        self._tolerance = tolerance or Tolerance.of(policy.compute_dtype)

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
    ) -> Trainer:
        """Load a model directory as policy, and again as the frozen reference if the algorithm has a KL term, and as
        the critic's start if it has a critic.

        `planned_updates` is what the learning-rate schedule spans. Raises `ModelError` for architectures not supported.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(seed)
        place = torch.device(device)
        policy = TrainedModel.load(
            model_path, dtype=config.dtype, device=place, gradient_checkpointing=config.gradient_checkpointing
        )
        reference = None
        if algorithm.needs_reference:
            reference = TrainedModel.load(model_path, dtype=config.dtype, device=place)
            reference.freeze()
        value_model = None
        if algorithm.needs_critic:
            value_model = Critic.load(
                model_path,
                config=critic or CriticConfig(),
                trainer_config=config,
                planned_updates=planned_updates,
                device=place,
            )
        return cls(
            policy,
            algorithm=algorithm,
            config=config,
            learning_rate=learning_rate,
            planned_updates=planned_updates,
            reference=reference,
            critic=value_model,
            tolerance=tolerance,
        )

    def train_step(self, batches: Sequence[Batch]) -> StepMetrics:
        """One update for each batch, `epochs` times over.

        A batch without a loss token makes no update. Raises `ParityError` or `TrainingError` before the update
        concerned: weights and version stay what they were.
        """
        start = time.perf_counter()
        works = [self._prepare(batch.experiences) for batch in batches]
        works = [work for work in works if work.parts]
        credit = assign([part for work in works for part in work.parts], self._algorithm)
        self._score_proximal(works)
        updates = [self._update(work) for _ in range(self._config.epochs) for work in works]
        packs = [part.pack for work in works for part in work.parts]
        values, alarms = _summarize(updates, self._algorithm)
        values |= credit.metrics
        if self._algorithm.kl_target is not None and updates:
            values["kl_coef"] = self._algorithm.kl_coef
            self._adapt_kl(values["kl_reference"] if credit.kl is None else credit.kl, packs)
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

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The trained weights by their Hugging Face names (tied ones once): the trainer's own memory, not a copy."""
        return {name: parameter.detach() for name, parameter in self.policy.parameters()}

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint; `position` is the caller's own JSON, given back by `restore`.

        Raises `CheckpointError`; then what was at `directory` stays, and nothing else is left behind.
        """
        adaptive = {} if self._algorithm.kl_target is None else {"kl_coef": self._algorithm.kl_coef}
        checkpoint.save(
            directory,
            module=self.policy.module,
            weights=self.state_tensors(),
            compute_dtype=self.policy.compute_dtype,
            optimizer_tensors=self._optimizer.state_tensors(),
            state={"version": self.version, "position": dict(position), **adaptive},
            further=self._critic.state_tensors() if self._critic is not None else {},
        )

    def restore(self, directory: Path) -> dict[str, Any]:
        """Continue from a checkpoint of the same model: weights, optimizer, critic, random state, version, adapted KL
        coefficient.

        Returns its `position`. Raises `CheckpointError` if it is not whole or not of this model.
        """
        saved = checkpoint.load(directory)
        if self._critic is not None:
            self._critic.restore(saved.further, directory)
        checkpoint.copy_into(dict(self.policy.parameters()), saved.weights, directory)
        self._optimizer.load_state_tensors(saved.optimizer_tensors)
        checkpoint.set_random_state(saved.random_state)
        self.version = int(saved.state["version"])
        if self._algorithm.kl_target is not None and "kl_coef" in saved.state:
            self._algorithm = replace(self._algorithm, kl_coef=float(saved.state["kl_coef"]))
        position: dict[str, Any] = saved.state["position"]
        return position

    def _prepare(self, experiences: Sequence[Experience]) -> _Work:
        """Leave out sequences that cannot change the gradient, pack the rest, score it with reference and critic."""
        kept = experiences
        if not self._algorithm.trains_zero_advantages:
            kept = [experience for experience in experiences if experience.advantages_T.any()]
            if not kept and experiences:
                # All rewards are the same. One group is computed nevertheless, for the comparison with the engine.
                kept = [experience for experience in experiences if experience.group_id == experiences[0].group_id]
        parts = [Part(pack=packed) for packed in pack(kept, self._config.max_tokens_per_micro_batch)]
        with torch.no_grad():
            for part in parts:
                if self._reference is not None:
                    part.reference_E = self._reference.score(part.pack).logprobs_E
                if self._critic is not None:
                    part.values_E = self._critic.values(part.pack)
        return _Work(parts=parts, skipped_tokens=_num_loss_tokens(experiences) - _num_loss_tokens(kept))

    def _score_proximal(self, works: Sequence[_Work]) -> None:
        """Logprobs of the weights before the step's first update. The first update computes its own, which are kept
        for later epochs; with one update a step there is nothing to do."""
        if self._algorithm.behaviour == "none":
            return
        with torch.no_grad():
            for part in (part for work in works[1:] for part in work.parts):
                part.proximal_E = self.policy.score(part.pack).logprobs_E

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

    def _update(self, work: _Work) -> _Update:
        self._optimizer.zero_grad()
        if self._critic is not None:
            self._critic.zero_grad()
        gap = LogprobGap(self.version)
        parts = [self._backward(part, gap) for part in work.parts]
        gap.check(self._tolerance)
        critic_update = None
        if self._critic is not None:
            self._backward_critic(self._critic, work)
            self._critic.check(self.version)  # so that policy and critic are updated both or not at all
        grad_norm, rate = self._optimizer.step(self.version)
        if self._critic is not None:
            critic_update = self._critic.step(self.version)
        self.version += 1
        sums, log_ratios_N, entropy = parts[0]
        for more_sums, more_N, more_entropy in parts[1:]:
            sums, log_ratios_N, entropy = sums + more_sums, log_ratios_N + more_N, entropy + more_entropy
        present = np.unique(np.concatenate([part.pack.rollouts_E for part in work.parts]))
        return _Update(
            sums=sums,
            entropy=float(entropy),
            gap=gap,
            sample_share=effective_sample_share(log_ratios_N.cpu()[present]),
            grad_norm=grad_norm,
            learning_rate=rate,
            critic=critic_update,
        )

    def _backward_critic(self, critic: Critic, work: _Work) -> None:
        for part in work.parts:
            assert part.values_E is not None
            assert part.returns_E is not None
            critic.backward(part.pack, part.values_E, part.returns_E, work.num_entries)

    def _backward(self, part: Part, gap: LogprobGap) -> tuple[ObjectiveSums, torch.Tensor, torch.Tensor]:
        """Add a pack's gradient; returns its sums, log ratios of the update's rollouts (shape N), and entropy sum."""
        pack, needs_entropy = part.pack, self._algorithm.needs_entropy
        scores = self.policy.score(pack, entropy_gradient=needs_entropy)
        now_E = scores.logprobs_E
        gap.add(pack, now_E)
        if self._algorithm.behaviour != "none" and part.proximal_E is None:
            part.proximal_E = now_E.detach()
        old_E, advantages_E, weights_E = (
            torch.from_numpy(array).to(now_E) for array in (pack.logprobs_E, pack.advantages_E, pack.weights_E)
        )
        loss, sums = policy_objective(
            self._algorithm,
            now_E,
            old_E,
            advantages_E,
            weights_E,
            part.reference_E,
            scores.entropy_E if needs_entropy else None,
            torch.from_numpy(_call_numbers(pack)).to(now_E.device) if self._algorithm.by_call else None,
            part.proximal_E,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        rollouts_E = torch.from_numpy(pack.rollouts_E).to(now_E.device)
        log_ratios_N = sequence_log_ratios(now_E, old_E, rollouts_E, len(pack.rollout_ids))
        return sums, log_ratios_N, scores.entropy_E.detach().sum()


def _call_numbers(pack: Pack) -> IndexArray:
    """For each loss entry the number of its call within the pack, shape E. A call is never split over packs."""
    keys_E = pack.rollouts_E * (int(pack.calls_E.max(initial=0)) + 1) + pack.calls_E
    numbers_E: IndexArray = np.unique(keys_E, return_inverse=True)[1]
    return numbers_E


def _num_loss_tokens(experiences: Iterable[Experience]) -> int:
    return sum(int(np.count_nonzero(experience.loss_mask_T)) for experience in experiences)


def _summarize(updates: Sequence[_Update], algorithm: Algorithm) -> tuple[dict[str, float], tuple[str, ...]]:
    """Metrics of a step's updates by name, and alarms."""
    if not updates:
        return {}, ()
    sums = updates[0].sums
    for update in updates[1:]:
        sums = sums + update.sums
    values = sums.means(algorithm)
    for name in ("loss", "policy_loss", "kl_loss", "entropy_loss"):  # sums over an update, so means over updates
        if name in values:
            values[name] /= len(updates)
    values["entropy"] = sum(update.entropy for update in updates) / max(float(sums.num_tokens), 1.0)
    values["grad_norm"] = sum(update.grad_norm for update in updates) / len(updates)
    values["learning_rate"] = updates[-1].learning_rate
    values["sample_share"] = min(update.sample_share for update in updates)
    measured = [update.gap for update in updates if update.gap.num_tokens]
    if measured:
        num_tokens = sum(gap.num_tokens for gap in measured)
        values["logprob_gap_mean"] = sum(gap.mean * gap.num_tokens for gap in measured) / num_tokens
        values["logprob_gap_max"] = max(gap.max for gap in measured)
        values["logprob_gap_kl"] = sum(gap.kl * gap.num_tokens for gap in measured) / num_tokens
        values["logprob_gap_tokens"] = num_tokens
    critics = [update.critic for update in updates if update.critic is not None]
    if critics:
        values["value_loss"] = sum(critic.loss for critic in critics) / len(critics)
        values["value_clip_fraction"] = sum(critic.clip_fraction for critic in critics) / len(critics)
        values["critic_grad_norm"] = sum(critic.grad_norm for critic in critics) / len(critics)
        values["critic_learning_rate"] = critics[-1].learning_rate
    alarm = sample_share_alarm(values["sample_share"])
    return values, (alarm,) if alarm else ()
