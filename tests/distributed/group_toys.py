"""Trainers of one and of several processes on the same toy model, and what they must have in common."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hybrid_toys import HYBRIDS, make_hybrid
from trainer_toys import make_experiences, make_model, plain_copy, record

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import RankError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer
from sharpen.learning.trainer.work import Minibatch
from sharpen.placement.ranks.group import TrainerGroup
from sharpen.placement.ranks.processes import RankProcesses
from sharpen.types import Experience

TIMEOUT_S = 120.0


def ranks_of(parent: int) -> dict[int, int]:
    """Rank processes that a process has: their ids, and when they were started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"sharpen.placement.ranks.main" in command and int(fields[1]) == parent:
            found[int(folder.name)] = int(fields[19])
    return found


def leftover_ranks() -> dict[int, int]:
    """Those of this process, but for the ones that all tests have in common."""
    return {id_: started for id_, started in ranks_of(os.getpid()).items() if id_ not in SHARED.process_ids}


def leftover_folders(process_id: int | None = None) -> list[Path]:
    """What ranks of a process (by default this one) left where temporary files are, but for the ones in common."""
    own = process_id is None
    found = list(Path(tempfile.gettempdir()).glob(f"sharpen-ranks-{os.getpid() if own else process_id}-*"))
    return found[1:] if own and SHARED.process_ids else found


def rank_process_ids() -> list[int]:
    """Of the ranks that this process has, in their order."""
    started = leftover_ranks()
    return sorted(started, key=lambda process: (started[process], process))


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A model on disk, and rollouts with the logprobs that it would have recorded."""

    folder: Path
    experiences: list[Experience]

    def batches(self, count: int = 1) -> list[Minibatch]:
        """The rollouts in so many minibatches."""
        size = -(-len(self.experiences) // count)
        return [Minibatch(experiences=self.experiences[i : i + size]) for i in range(0, len(self.experiences), size)]


def make_toy(folder: Path, family: str = "qwen3", **kind: Any) -> Toy:
    module = make_hybrid(family) if family in HYBRIDS else make_model(family, torch.float32)
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


def one_process(plan: TrainerPlan) -> Any:
    return Trainer.load(plan, "cpu")


@contextmanager
def processes(plan: TrainerPlan, count: int = 2, **options: Any) -> Iterator[RankProcesses]:
    ranks = RankProcesses(plan, count, on_gpus=False, **{"timeout_s": TIMEOUT_S, **options})
    try:
        yield ranks
    finally:
        ranks.close()


class RaisesOn:
    """The word `version`, as it arrives at a rank; one of them raises an error instead."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        """Ranks cannot import this module."""
        error = f"__import__('sharpen.errors').errors.TrainingError('on rank {self._rank} alone')"
        this = "__import__('torch').distributed.get_rank()"
        return eval, (f"'version' if {this} != {self._rank} else (_ for _ in ()).throw({error})",)


class SharedRanks:
    """Two ranks that tests have in common, since processes take seconds to start; new ones after they were ended."""

    def __init__(self) -> None:
        self._ranks: RankProcesses | None = None

    @property
    def process_ids(self) -> list[int]:
        """Of those that are there."""
        return [] if self._ranks is None else self._ranks.process_ids

    def load(self, plan: TrainerPlan) -> RankProcesses:
        """The ranks, with the models of this plan."""
        if self._ranks is None:
            self._ranks = RankProcesses(plan, 2, on_gpus=False, timeout_s=TIMEOUT_S)
            return self._ranks
        try:
            self._ranks.load(plan)
        except RankError:  # the test before has ended them
            self._ranks = None
            return self.load(plan)
        return self._ranks

    def close(self) -> None:
        """End them."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


SHARED = SharedRanks()


def group_of(plan: TrainerPlan) -> TrainerGroup:
    """A trainer of the two ranks in common; it holds until the next one is asked for."""
    return TrainerGroup(SHARED.load(plan))


def assert_same_numbers(one: Any, many: Any, *, relative: float = 1e-6) -> None:
    """Two `StepMetrics`, but for how the work was divided and how long it took. Gaps are rounding errors themselves;
    the largest ratio is the exponential of one difference of logprobs, which are rounded so."""
    assert (one.version, one.num_updates, one.trained_tokens) == (many.version, many.num_updates, many.trained_tokens)
    assert one.values.keys() == many.values.keys()
    for name, value in one.values.items():
        if name.startswith("logprob_gap") and name != "logprob_gap_tokens":
            assert abs(value - many.values[name]) < 1e-5, name
            continue
        bound = max(relative, 1e-5) if name == "ratio_max" else relative
        assert abs(value - many.values[name]) <= bound * max(abs(value), 1.0), (name, value, many.values[name])
    calls = {(call.rollout_id, call.call): call for call in many.entropies}
    assert len(calls) == len(one.entropies)
    for call in one.entropies:
        other = calls[call.rollout_id, call.call]
        np.testing.assert_allclose(other.entropies_S, call.entropies_S, rtol=max(relative, 2e-3))
        np.testing.assert_allclose(
            other.log_ratios_S, call.log_ratios_S, rtol=max(relative, 2e-3), atol=max(relative, 1e-5)
        )
        if relative < 1e-3:  # else rounding decides whether a ratio near a bound is clipped
            np.testing.assert_array_equal(other.clipped_S, call.clipped_S)


def assert_same_weights(one: Any, many: Any, *, absolute: float = 2e-6) -> None:
    """The weights to act with, of two trainers."""
    first, second = dict(one.state_tensors()), dict(many.state_tensors())
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert second[name].dtype == tensor.dtype, name
        torch.testing.assert_close(second[name], tensor, atol=absolute, rtol=0.0, msg=name)
