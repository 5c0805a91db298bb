"""The trainer of a run: in the coordinator's process, or several processes that train together.

In: a run's configuration and algorithm. Out: a trainer; or `ConfigError` before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from agenttune.config.run import RunConfig
from agenttune.errors import ConfigError
from agenttune.execution.teacher_files import teacher_folder

if TYPE_CHECKING:
    from agenttune.algorithm.presets import Algorithm
    from agenttune.algorithm.supervised import SupervisedAlgorithm
    from agenttune.execution.ranks.group import StartRanks, SupervisedGroup, TrainerGroup
    from agenttune.execution.ranks.processes import RankProcesses
    from agenttune.execution.ranks.trainer import TrainerPlan
    from agenttune.supervised.trainer import SupervisedTrainer
    from agenttune.trainer.trainer import Trainer


AnyTrainer: TypeAlias = "Trainer | TrainerGroup"
AnySupervisedTrainer: TypeAlias = "SupervisedTrainer | SupervisedGroup"


def check_trainer(config: RunConfig) -> None:
    """Refuse processes that cannot be had on this machine, and settings without effect. Raises `ConfigError`."""
    if config.trainer.has_ranks and not config.uses_ray:  # there the cluster's GPUs count
        check_processes(config, num_gpus=_num_gpus())


def check_processes(config: RunConfig, *, num_gpus: int) -> None:
    """The same on a machine with so many GPUs."""
    trainer, on_gpus = config.trainer, _on_gpus(config, num_gpus)
    if trainer.cpu_offload and not on_gpus:
        raise ConfigError(
            "trainer.cpu_offload is true, but the trainer computes on the CPU (engine.device "
            f"{config.engine.device!r}, {num_gpus} GPUs here): it has no effect, leave it out"
        )
    if on_gpus and trainer.num_processes > num_gpus:
        raise ConfigError(
            f"trainer.num_processes is {trainer.num_processes}, but {num_gpus} GPU(s) are here and each process needs "
            "one: set it lower, or engine.device to cpu"
        )


def make_trainer(
    config: RunConfig, algorithm: Algorithm, folder: Path, *, total_steps: int, ranks: StartRanks | None = None
) -> AnyTrainer:
    """A trainer for rollouts of the model in `folder`; `ranks` starts it in several places elsewhere. Raises
    `ModelError` for architectures not supported, `RankError` if a process does not start."""
    teacher_path = teacher_folder(config, algorithm)
    if ranks is not None:
        from agenttune.execution.ranks.group import TrainerGroup

        return TrainerGroup(ranks(_plan(config, algorithm, folder, total_steps, teacher_path)))
    if config.trainer.has_ranks:
        from agenttune.execution.ranks.group import TrainerGroup

        return TrainerGroup(_start(config, algorithm, folder, total_steps, teacher_path))
    from agenttune.trainer.trainer import Trainer

    return Trainer.from_pretrained(
        folder,
        algorithm=algorithm,
        config=config.trainer,
        learning_rate=config.algorithm.learning_rate,
        planned_updates=_planned_updates(config, total_steps),
        device=config.engine.device,
        seed=config.seed,
        critic=config.critic,
        teacher_path=teacher_path,
    )


def make_supervised_trainer(
    config: RunConfig,
    algorithm: SupervisedAlgorithm,
    folder: Path,
    *,
    total_steps: int,
    ranks: StartRanks | None = None,
) -> AnySupervisedTrainer:
    """A trainer for rows; `ranks` and errors as in `make_trainer`."""
    if ranks is not None:
        from agenttune.execution.ranks.group import SupervisedGroup

        return SupervisedGroup(ranks(_plan(config, algorithm, folder, total_steps, None)))
    if config.trainer.has_ranks:
        from agenttune.execution.ranks.group import SupervisedGroup

        return SupervisedGroup(_start(config, algorithm, folder, total_steps, None))
    from agenttune.supervised.trainer import SupervisedTrainer

    return SupervisedTrainer.from_pretrained(
        folder,
        algorithm=algorithm,
        config=config.trainer,
        learning_rate=config.algorithm.learning_rate,
        planned_updates=_planned_updates(config, total_steps),
        device=config.engine.device,
        seed=config.seed,
    )


def _start(
    config: RunConfig,
    algorithm: Algorithm | SupervisedAlgorithm,
    folder: Path,
    total_steps: int,
    teacher_path: Path | None,
) -> RankProcesses:
    from agenttune.execution.ranks.processes import RankProcesses

    plan = _plan(config, algorithm, folder, total_steps, teacher_path)
    return RankProcesses(plan, config.trainer.num_processes, on_gpus=_on_gpus(config, _num_gpus()))


def _plan(
    config: RunConfig,
    algorithm: Algorithm | SupervisedAlgorithm,
    folder: Path,
    total_steps: int,
    teacher_path: Path | None,
) -> TrainerPlan:
    from agenttune.execution.ranks.trainer import TrainerPlan

    return TrainerPlan(
        model_path=str(folder),
        algorithm=algorithm,
        config=config.trainer,
        learning_rate=config.algorithm.learning_rate,
        planned_updates=_planned_updates(config, total_steps),
        seed=config.seed,
        teacher_path=None if teacher_path is None else str(teacher_path),
        critic=config.critic,
    )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _on_gpus(config: RunConfig, num_gpus: int) -> bool:
    """Whether the trainer computes on GPUs."""
    return config.engine.device.startswith("cuda") or (config.engine.device == "auto" and num_gpus > 0)


def _planned_updates(config: RunConfig, total_steps: int) -> int:
    return total_steps * config.trainer.num_minibatches * config.trainer.epochs
