"""Turns the sequences of a step into updated weights.

In: a batch for each update of a step. Out: `StepMetrics`, new weights as `state_tensors()`, checkpoints. The trainer
owns the trained weights, their optimizers and their version. Its loss computes the gradient of an update: `RolloutLoss`
or `RowLoss`, depending on the algorithm. The loss weights are already normalized over the whole update, so the
gradients of its micro-batches simply add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sharpen.config.trainer import TrainerConfig
from sharpen.engine.token_masks import TokenMasks
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.supervised import SupervisedAlgorithm
from sharpen.learning.trainer import checkpoint
from sharpen.learning.trainer.critic import Critic
from sharpen.learning.trainer.gradients import Gradients, compute_gradients
from sharpen.learning.trainer.lora import adapters_line
from sharpen.learning.trainer.measured import StepMetrics, token_entropies
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.optimizer import Optimizer
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.reference import Reference
from sharpen.learning.trainer.roles import TrainerPlan, load_roles
from sharpen.learning.trainer.rollout_loss import RolloutLoss
from sharpen.learning.trainer.rounding import Rounding
from sharpen.learning.trainer.row_loss import RowLoss, UpdateLoss
from sharpen.learning.trainer.step_start import StepStart
from sharpen.learning.trainer.teacher import Teachers
from sharpen.learning.trainer.team import Team
from sharpen.learning.trainer.work import TrainingBatch, Work
from sharpen.models.frozen import Served
from sharpen.types import Experience


class Trainer:
    """Trains a policy on rollouts or on rows. `version` is the number of updates made to the policy."""

    beside: Callable[[], Mapping[str, Mapping[str, torch.Tensor]]] = dict
    """Returns what a checkpoint holds of weights that are served beside the trained ones, by file name."""

    def __init__(
        self,
        policy: TrainedModel,
        *,
        algorithm: Algorithm | SupervisedAlgorithm,
        config: TrainerConfig,
        learning_rate: float,
        planned_updates: int,
        reference: Reference | None = None,
        critic: Critic | None = None,
        teachers: Teachers | None = None,
        tolerance: Tolerance | None = None,
        rounding: Rounding | None = None,
        team: Team | None = None,
        masks: TokenMasks | None = None,
    ) -> None:
        """Train `policy`. Pass `reference`, `critic` and `teachers` if, and only if, the algorithm needs them. If
        `team` has several ranks, all models must be sharded already. `tolerance` defaults to one based on `rounding`.
        `masks` are those of the policy, for tokens that were sampled under a constraint."""
        self.version = 0
        self.policy = policy
        self.rounding = rounding
        self._critic = critic
        self._epochs = config.epochs
        self._team = team or Team()
        max_tokens = config.max_tokens_per_micro_batch
        measured = None if rounding is None else rounding.rounding
        self._loss: RolloutLoss | RowLoss
        if isinstance(algorithm, SupervisedAlgorithm):
            self._loss = RowLoss(
                policy,
                algorithm,
                max_tokens=max_tokens,
                reference=reference,
                team=self._team,
                balance_coef=config.balance_coef,
            )
        else:
            self._loss = RolloutLoss(
                policy,
                algorithm,
                max_tokens=max_tokens,
                reference=reference,
                critic=critic,
                teachers=teachers,
                tolerance=tolerance or Tolerance.of(policy.compute_dtype, measured),
                team=self._team,
                masks=masks,
                balance_coef=config.balance_coef,
            )
        self._optimizer = Optimizer(
            policy.parameters(),
            config,
            peak_learning_rate=learning_rate,
            planned_updates=planned_updates,
            tables=policy.tables(),
        )
        self._optimizers = (self._optimizer, *([] if critic is None else [critic.optimizer]))
        num_updates = config.updates
        self._start = StepStart(self._optimizers, num_updates=num_updates, num_ranks=self._team.size)

    @classmethod
    def load(
        cls,
        plan: TrainerPlan,
        device: str | torch.device = "auto",
        team: Team | None = None,
        *,
        tolerance: Tolerance | None = None,
        served: Served | None = None,
    ) -> Trainer:
        """Load the models of a plan. Each rank of a `team` calls this with its own `device`. `served` as in
        `lora.load_trained`. Raises what `load_roles` raises."""
        team = team or Team()
        roles = load_roles(plan, device, team, served)
        return cls(
            roles.policy,
            algorithm=plan.algorithm,
            config=plan.config,
            learning_rate=plan.learning_rate,
            planned_updates=plan.planned_updates,
            reference=roles.reference,
            critic=roles.critic,
            teachers=roles.teachers,
            tolerance=tolerance,
            rounding=roles.rounding,
            team=team,
            masks=TokenMasks.of_folder(plan.model_path),
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines about the model for the user: how much of it is trained, and with which kernels."""
        measured = self.rounding.line if self.rounding is not None else ""
        lines = (adapters_line(self.policy), *self.policy.kernels, self._start.line, measured)
        return tuple(line for line in lines if line)

    def train_step(
        self, batches: Sequence[TrainingBatch], *, step: int | None = None, probe: Sequence[Experience] = ()
    ) -> StepMetrics:
        """Make one update for each batch, and repeat for `epochs`. `step` counts from 1; it is required if the
        algorithm has an expert loss, whose weight depends on it. `probe` holds sequences of the current version. They
        are compared with the engine's logprobs if the first update contains only tokens of older versions.

        A batch without loss tokens makes no update. Raises `ParityError` or `TrainingError` before the failing update,
        so that weights and version do not change; `back_to` undoes the updates before it.
        """
        start = time.perf_counter()
        works = self._loss.begin(batches, version=self.version, step=step, probe=probe)
        self._start.begin(self.version, len(works) * self._epochs, self._loss.algorithm)
        updates = [self._update(work) for _ in range(self._epochs) for work in works]
        values, alarms = self._loss.end(works)
        packs = [pack for work in works for pack in work.packs]
        return StepMetrics(
            version=self.version,
            num_updates=len(updates),
            trained_tokens=sum(pack.num_trained_tokens for pack in packs),
            computed_tokens=sum(pack.num_computed_tokens for pack in packs),
            sequence_tokens=sum(pack.num_sequence_tokens for pack in packs),
            skipped_tokens=sum(work.skipped_tokens for work in works),
            seconds=time.perf_counter() - start,
            values=values | _norms_and_rates(updates),
            alarms=alarms,
            entropies=token_entropies(works),
        )

    def measure(self, experiences: Sequence[Experience]) -> UpdateLoss:
        """Return the loss of rows without training on them; only for algorithms that learn from rows."""
        assert isinstance(self._loss, RowLoss)
        return self._loss.measure(experiences)

    def gradients(self, experiences: Sequence[Experience], names: Collection[str] | None = None) -> Gradients:
        """Return the gradient of an update on these sequences of the current version, without making it; `names`: of
        these parameters only. See `trainer.gradients`."""
        after = self.version + 1  # so that all of them are of an earlier one, and no engine is compared with
        return compute_gradients(self.policy, self._critic, self._loss, self._team, experiences, names, after)

    def back_to(self, version: int) -> bool:
        """Go back to the weights and optimizer state of `version`: the current ones, or those that the last step kept
        when it began. Return False, changing nothing, if neither is of that version."""
        if self.version == version and self._start.is_whole():
            return True
        restored, algorithm = self._start.go_back(version)
        if restored:
            self.version, self._loss.algorithm = version, algorithm
        return restored

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights for the engine by their Hugging Face names; see `TrainedModel.state_tensors`."""
        return self.policy.state_tensors()

    def close(self) -> None:
        """Do nothing: the process frees all that a trainer holds."""

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint; `position` is JSON of the caller, which `restore` returns.

        Raises `CheckpointError`; then whatever was at `directory` is unchanged and no partial files remain.
        """
        checkpoint.save(
            directory,
            policy=self.policy,
            optimizer_tensors=self._optimizer.state_tensors(),
            state={"version": self.version, "position": dict(position), **self._loss.state()},
            further={**self._loss.state_tensors(), **self.beside()},
            team=self._team,
        )

    def save_start(self, run_dir: Path) -> None:
        """Write what no checkpoint holds of the state before the first update: adapters, which begin at random. Raises
        `CheckpointError`."""
        checkpoint.save_start(run_dir, self.policy, self._team)

    def restore(self, directory: Path) -> dict[str, Any]:
        """Load weights, optimizer, random state, version and the state of the loss from a checkpoint.

        Returns its `position`. Raises `CheckpointError` if it is incomplete, or was written with another model or
        teacher.
        """
        saved = checkpoint.load(directory)
        with self._start.update():
            self._loss.restore(saved, directory)
            checkpoint.restore_policy(self.policy, saved, directory)
            self._optimizer.load_state_tensors(saved.optimizer_tensors)
            self.version = int(saved.state["version"])
        checkpoint.set_random_state(saved.random_state)
        position: dict[str, Any] = saved.state["position"]
        return position

    def _update(self, work: Work) -> dict[str, tuple[float, float]]:
        """Make an update. Return the gradient norm and learning rate of each optimizer that had gradients, by name.
        Gradients, which are as large as the weights, do not outlive it: rollouts and scores need the memory."""
        try:
            for optimizer in self._optimizers:
                optimizer.begin()
            self._loss.backward(work, self.version)
            active = [optimizer for optimizer in self._optimizers if optimizer.has_gradients]
            norms = [optimizer.norm(self.version) for optimizer in active]  # may raise, so before any is applied
            with self._start.update():
                rates = [optimizer.apply(self.version, norm) for optimizer, norm in zip(active, norms, strict=True)]
                self.version += 1
        finally:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        return {optimizer.name: (float(norm), rate) for optimizer, norm, rate in zip(active, norms, rates, strict=True)}


def _norms_and_rates(updates: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Return each optimizer's mean gradient norm and last learning rate, as metrics by name."""
    values: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        norms, rates = zip(*(update[name] for update in updates if name in update), strict=True)
        prefix = f"{name}_" if name else ""
        values |= {f"{prefix}grad_norm": sum(norms) / len(norms), f"{prefix}learning_rate": rates[-1]}
    return values
