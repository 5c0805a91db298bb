"""From a batch of lessons to updated weights.

In: the experiences of each update. Out: `Learnt` numbers, and new weights. It uses the model, packs, optimizer and
checkpoints of the trainer for rollouts; since nobody sampled these tokens there is no ratio and nothing to compare with
an engine. A pair is never split over packs, because its loss needs both of its answers.

Shape suffixes: E loss entries of a pack, N pairs of an update.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpen.algorithm.supervised import SupervisedAlgorithm, cross_entropy, margins
from sharpen.config.trainer import TrainerConfig
from sharpen.trainer import checkpoint
from sharpen.trainer.lora import adapters_line
from sharpen.trainer.model import Scorer, TrainedModel
from sharpen.trainer.optimizer import Optimizer
from sharpen.trainer.packing import Pack, pack
from sharpen.trainer.roles import load_roles, resolve_device
from sharpen.trainer.scores import to_device
from sharpen.trainer.step_start import StepStart
from sharpen.trainer.team import IDLE, Team, backward_nothing
from sharpen.types import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What a step did. `loss` is the mean over its updates; `accuracy` the share of pairs whose better answer gained on
    the worse one, and `margin` their mean log ratio, None without pairs. Tokens are those of one pass over the data, as
    in `trainer.StepMetrics`."""

    num_updates: int
    trained_tokens: int
    computed_tokens: int
    sequence_tokens: int
    loss: float
    grad_norm: float
    learning_rate: float
    accuracy: float | None
    margin: float | None
    seconds: float

    def metrics(self) -> dict[str, float]:
        """As numbers to log."""
        found = {f"trainer/{name}": getattr(self, name) for name in self.__slots__}
        return {name: float(value) for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Losses of some experiences: their sum with their weights, each row's (or pair's) part of it by id, and the margin
    of each pair."""

    loss: float
    rows: Mapping[str, float]
    margins: Mapping[str, float]


class SupervisedTrainer:
    """Owns the trained weights, their optimizer, and the frozen reference. `version` counts the updates they had."""

    def __init__(
        self,
        policy: TrainedModel,
        *,
        algorithm: SupervisedAlgorithm,
        config: TrainerConfig,
        learning_rate: float,
        planned_updates: int,
        reference: Scorer | None = None,
        team: Team | None = None,
    ) -> None:
        """Train `policy`. `reference` must be given exactly if the algorithm needs one."""
        assert (reference is not None) == algorithm.needs_reference
        self.version = 0
        self.policy = policy
        self._optimizer = Optimizer(
            policy.parameters(), config, peak_learning_rate=learning_rate, planned_updates=planned_updates
        )
        self._algorithm = algorithm
        self._config = config
        self._reference = reference
        self._team = team or Team()
        self._start = StepStart(
            [self._optimizer], num_updates=config.num_minibatches * config.epochs, num_ranks=self._team.size
        )

    @classmethod
    def from_pretrained(
        cls,
        model_path: Path,
        *,
        algorithm: SupervisedAlgorithm,
        config: TrainerConfig,
        learning_rate: float,
        planned_updates: int,
        device: str | torch.device = "auto",
        seed: int = 0,
        team: Team | None = None,
    ) -> SupervisedTrainer:
        """Load a model directory as policy, and as reference where one is needed (a resumed run's reference is the
        model it once started from; with adapters, the policy without them). Raises `ModelError` for architectures not
        supported."""
        torch.manual_seed(seed)
        place, team = resolve_device(device), team or Team()
        policy, reference = load_roles(model_path, config, place, team, needs_reference=algorithm.needs_reference)
        return cls(
            policy,
            algorithm=algorithm,
            config=config,
            learning_rate=learning_rate,
            planned_updates=planned_updates,
            reference=reference,
            team=team,
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """What to tell the user of the model: how much of it is trained, with which kernels."""
        return tuple(line for line in (adapters_line(self.policy), *self.policy.kernels, self._start.line) if line)

    def close(self) -> None:
        """Nothing is held that the process does not free."""

    def train_step(self, updates: Sequence[Sequence[Experience]]) -> Learnt:
        """One update for each list of experiences, `trainer.epochs` times over.

        Raises `TrainingError` before an update whose gradient is not finite: weights and version stay what they were;
        `back_to` undoes the updates before it.
        """
        start = time.perf_counter()
        works = [self._packs(experiences) for experiences in updates]
        references = [self._reference_logprobs(work) for work in works]
        losses, norms, rates, found = [], [], [], dict[str, float]()
        self._start.begin(self.version, len(works) * self._config.epochs)
        for _ in range(self._config.epochs):
            for work, reference in zip(works, references, strict=True):
                self._optimizer.zero_grad()
                total, _, of_pairs = self._losses(work, reference, backward=True)
                norm = self._optimizer.norm(self.version)
                with self._start.update():
                    rate = self._optimizer.apply(self.version, norm)
                    self.version += 1
                found |= of_pairs
                losses.append(total)
                norms.append(float(norm))
                rates.append(rate)
        packs = [part for work in works for part in work]
        return Learnt(
            num_updates=len(losses),
            trained_tokens=sum(part.num_trained_tokens for part in packs),
            computed_tokens=sum(part.num_computed_tokens for part in packs),
            sequence_tokens=sum(part.num_sequence_tokens for part in packs),
            loss=sum(losses) / len(losses),
            grad_norm=sum(norms) / len(norms),
            learning_rate=rates[-1],
            accuracy=sum(margin > 0 for margin in found.values()) / len(found) if found else None,
            margin=sum(found.values()) / len(found) if found else None,
            seconds=time.perf_counter() - start,
        )

    def measure(self, experiences: Sequence[Experience]) -> Measured:
        """The loss of these experiences, without training on them."""
        packs = self._packs(experiences)
        total, rows, found = self._losses(packs, self._reference_logprobs(packs), backward=False)
        return Measured(loss=total, rows=rows, margins=found)

    def back_to(self, version: int) -> bool:
        """Have the weights of this version, whole; see `Trainer.back_to`."""
        if self.version == version and self._start.is_whole():
            return True
        went, _ = self._start.go_back(version)
        if went:
            self.version = version
        return went

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The weights to act with, by their Hugging Face names; see `TrainedModel.state_tensors`."""
        return self.policy.state_tensors()

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint; `position` is the caller's own JSON, given back by `restore`.

        Raises `CheckpointError`.
        """
        checkpoint.save(
            directory,
            policy=self.policy,
            optimizer_tensors=self._optimizer.state_tensors(),
            state={"version": self.version, "position": dict(position)},
            team=self._team,
        )

    def restore(self, directory: Path) -> dict[str, Any]:
        """Continue from a checkpoint of the same model; returns its `position`. Raises `CheckpointError`."""
        saved = checkpoint.load(directory)
        with self._start.update():
            checkpoint.restore_policy(self.policy, saved, directory)
            self._optimizer.load_state_tensors(saved.optimizer_tensors)
            self.version = int(saved.state["version"])
        checkpoint.set_random_state(saved.random_state)
        position: dict[str, Any] = saved.state["position"]
        return position

    def _packs(self, experiences: Sequence[Experience]) -> list[Pack]:
        limit = self._config.max_tokens_per_micro_batch
        if self._algorithm.pair_loss is None:
            return self._team.packs(experiences, limit)
        return [part for unit in _units(experiences, limit) for part in pack(unit, _num_tokens(unit))]

    def _reference_logprobs(self, packs: Sequence[Pack]) -> Sequence[torch.Tensor | None]:
        if (reference := self._reference) is None:
            return [None] * len(packs)
        with torch.no_grad():
            return self._team.map(
                packs, lambda part: reference.score(part).logprobs_E.cpu(), lambda: reference.score(IDLE)
            )

    def _losses(
        self, packs: Sequence[Pack], references: Sequence[torch.Tensor | None], *, backward: bool
    ) -> tuple[float, dict[str, float], dict[str, float]]:
        """The loss of an update, its rows' parts of it and its pairs' margins by id; its gradient is added if asked
        for."""
        reference_of = dict(zip(map(id, packs), references, strict=True))

        def compute(part: Pack) -> tuple[float, dict[str, float], dict[str, float]]:
            with torch.set_grad_enabled(backward):
                loss, of_rows, of_pairs = self._loss(part, reference_of[id(part)])
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach()), of_rows, of_pairs

        def idle() -> None:
            if backward:
                backward_nothing(self.policy)
                return
            with torch.no_grad():
                self.policy.score(IDLE)

        found = self._team.map(packs, compute, idle)
        margins_by_id = {name: margin for _, _, of_pairs in found for name, margin in of_pairs.items()}
        rows: dict[str, float] = {}
        for _, of_rows, _ in found:  # a row's sequences may be in several packs
            rows |= {name: rows.get(name, 0.0) + loss for name, loss in of_rows.items()}
        return sum(loss for loss, _, _ in found), rows, margins_by_id

    def _loss(
        self, part: Pack, reference_E: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float], dict[str, float]]:
        """The pack's part of the update's loss, its rows' parts of that and its pairs' margins by id."""
        logprobs_E = self.policy.score(part).logprobs_E
        weights_E = to_device(part.weights_E, logprobs_E.device).to(logprobs_E.dtype)
        present, numbers = np.unique(part.rollouts_E, return_inverse=True)
        names = [part.rollout_ids[number] for number in present]
        pairs_E = to_device(numbers, logprobs_E.device)
        if self._algorithm.pair_loss is None:
            rows_N = weights_E.new_zeros(len(present)).index_add(0, pairs_E, -(weights_E * logprobs_E).detach())
            return cross_entropy(logprobs_E, weights_E), dict(zip(names, rows_N.tolist(), strict=True)), {}
        assert reference_E is not None
        sides_E = to_device(part.advantages_E, logprobs_E.device).to(logprobs_E.dtype)
        margins_N = margins(logprobs_E, to_device(reference_E, logprobs_E.device), sides_E, pairs_E, len(present))
        weights_N = weights_E.new_zeros(len(present)).index_add(0, pairs_E, weights_E)
        losses_N = weights_N * self._algorithm.pair_loss(margins_N, **self._algorithm.pair_loss_args)
        parts = dict(zip(names, losses_N.detach().tolist(), strict=True))
        return losses_N.sum(), parts, dict(zip(names, margins_N.detach().tolist(), strict=True))


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
