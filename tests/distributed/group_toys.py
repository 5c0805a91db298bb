"""Trainers of one and of several processes on the same toy model, and what they must have in common."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trainer_toys import make_experiences, make_model, plain_copy, record

from agenttune.algorithm.resolve import resolve
from agenttune.config.run import LossConfig
from agenttune.config.trainer import TrainerConfig
from agenttune.execution.ranks.group import TrainerGroup
from agenttune.execution.ranks.processes import RankProcesses
from agenttune.execution.ranks.trainer import RankBatch, TrainerPlan
from agenttune.trainer.trainer import Trainer
from agenttune.types import Experience

TIMEOUT_S = 120.0


def leftover_ranks() -> dict[int, int]:
    """Rank processes that this process started and that still are there: their ids, and when they were started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"agenttune.execution.ranks.main" in command and int(fields[1]) == os.getpid():
            found[int(folder.name)] = int(fields[19])
    return found


def rank_process_ids() -> list[int]:
    """Of the ranks that this process has, in their order."""
    started = leftover_ranks()
    return sorted(started, key=lambda process: (started[process], process))


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A model on disk, and rollouts with the logprobs that it would have recorded."""

    folder: Path
    experiences: list[Experience]

    def batches(self, count: int = 1) -> list[RankBatch]:
        """The rollouts in so many minibatches."""
        size = -(-len(self.experiences) // count)
        return [RankBatch(experiences=self.experiences[i : i + size]) for i in range(0, len(self.experiences), size)]


def make_toy(folder: Path, family: str = "qwen3", **kind: Any) -> Toy:
    module = make_model(family, torch.float32)
    module.save_pretrained(folder)
    return Toy(folder=folder, experiences=record(plain_copy(module), make_experiences(**kind)))


def make_plan(
    toy: Toy, *, loss: Any = None, algorithm: str = "multi_step_grpo", rate: float = 1e-3, **config: Any
) -> TrainerPlan:
    return TrainerPlan(
        model_path=str(toy.folder),
        algorithm=resolve(algorithm, LossConfig(**(loss or {})), 8),
        config=TrainerConfig(**{"max_tokens_per_micro_batch": 80, "eps": 1e-3, **config}),
        learning_rate=rate,
        planned_updates=10,
        seed=0,
    )


def one_process(plan: TrainerPlan, **options: Any) -> Trainer:
    return Trainer.from_pretrained(
        plan.model_path,
        algorithm=plan.algorithm,
        config=plan.config,
        learning_rate=plan.learning_rate,
        planned_updates=plan.planned_updates,
        device="cpu",
        seed=plan.seed,
        **options,
    )


@contextmanager
def processes(plan: TrainerPlan, count: int = 2, **options: Any) -> Iterator[RankProcesses]:
    ranks = RankProcesses(plan, count, on_gpus=False, **{"timeout_s": TIMEOUT_S, **options})
    try:
        yield ranks
    finally:
        ranks.close()


@contextmanager
def group_of(plan: TrainerPlan, count: int = 2, **options: Any) -> Iterator[TrainerGroup]:
    with processes(plan, count, **options) as ranks:
        yield TrainerGroup(ranks)


def assert_same_numbers(one: Any, many: Any, *, relative: float = 1e-6) -> None:
    """Two `StepMetrics`, but for how the work was divided and how long it took. Gaps are rounding errors themselves."""
    assert (one.version, one.num_updates, one.trained_tokens) == (many.version, many.num_updates, many.trained_tokens)
    assert one.values.keys() == many.values.keys()
    for name, value in one.values.items():
        if name.startswith("logprob_gap") and name != "logprob_gap_tokens":
            assert abs(value - many.values[name]) < 1e-5, name
            continue
        assert abs(value - many.values[name]) <= relative * max(abs(value), 1.0), (name, value, many.values[name])


def assert_same_weights(one: Any, many: Any, *, absolute: float = 2e-6) -> None:
    """The weights to act with, of two trainers."""
    first, second = dict(one.state_tensors()), dict(many.state_tensors())
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert second[name].dtype == tensor.dtype, name
        torch.testing.assert_close(second[name], tensor, atol=absolute, rtol=0.0, msg=name)
