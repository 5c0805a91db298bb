"""What is known to be wrong with a run before anything is loaded, and the run's tasks.

In: a `RunConfig` and the user's functions. Out: the `Algorithm` and `TaskData`, or `ConfigError` and its kin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.algorithm.presets import Algorithm
from sharpen.algorithm.resolve import algorithm_of
from sharpen.algorithm.supervised import SUPERVISED
from sharpen.compat.agentscope import imported_line
from sharpen.config.run import RunConfig, SupervisedConfig
from sharpen.config.trainer import CriticConfig
from sharpen.errors import ConfigError
from sharpen.execution.auxiliary_settings import check_auxiliary_models
from sharpen.execution.engine_choice import check_heads
from sharpen.execution.model_files import model_folder
from sharpen.execution.start import check_execution
from sharpen.execution.teacher_files import check_teacher
from sharpen.execution.trainers import check_trainer
from sharpen.experience.replay import Replay
from sharpen.monitor.metrics import check_monitor
from sharpen.rollout.signature import judge_arguments, workflow_arguments
from sharpen.supervised.expert import read_expert_rows
from sharpen.sync.schedule import Schedule
from sharpen.tasks.order import hold_out
from sharpen.tasks.source import load_tasks
from sharpen.trainer.lora_settings import check_lora
from sharpen.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The tasks to train on, those held out, further sets by name, an expert's rows, and what to tell the user."""

    training: Sequence[Task]
    held_out: Sequence[Task]
    further: Mapping[str, Sequence[Task]]
    expert: Sequence[Task]
    messages: tuple[str, ...]


def check_arguments(config: RunConfig, workflow: Callable[..., Any], judge: Callable[..., Any] | None) -> Algorithm:
    """Everything that is known to be wrong before anything is loaded."""
    imported_line()
    _refuse_supervised(config)
    workflow_arguments(workflow)
    if judge is not None:
        judge_arguments(judge)
    algorithm = algorithm_of(config)
    if config.critic != CriticConfig() and not algorithm.needs_critic:
        raise ConfigError(
            f"the settings of critic have no effect: {config.algorithm.algorithm_type!r} has no critic (ppo has)"
        )
    check_sync(config, algorithm)
    Replay.of(config, algorithm, ahead=Schedule.of(config, total=1).max_staleness)
    if config.model.top_p < 1.0:
        raise ConfigError(
            f"model.top_p is {config.model.top_p:g}, but training needs tokens sampled from the model's whole "
            "distribution, which is the one that it changes: set top_p to 1"
        )
    if config.model.temperature == 0.0:
        raise ConfigError("model.temperature is 0: greedy rollouts are all alike and nothing is learnt; set it to 1")
    check_auxiliary_models(config)
    check_heads(config.model, Path(config.model.model_path).expanduser())
    check_execution(config)
    check_monitor(config.monitor_type)
    check_lora(config.trainer)
    check_trainer(config)
    check_heads(config.model, model_folder(config.model.model_path))
    check_teacher(config, algorithm)
    return algorithm


def check_sync(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise `ConfigError` where rollouts that run ahead of the training would be wrong."""
    if not Schedule.of(config, total=1).overlaps:
        return
    said = f"sync.style {config.sync.style!r}, interval {config.sync.interval}, offset {config.sync.offset}"
    if not (algorithm.off_policy or algorithm.needs_teacher):  # a teacher judges any state
        raise ConfigError(
            f"with {said} tokens are of older policies, but {algorithm.policy_loss!r} of "
            f"{config.algorithm.algorithm_type!r} has no probability ratio to correct for them: leave sync out, or set "
            "loss.policy_loss to one that does (ppo, importance_sampling, topr, opmd)"
        )
    if config.deterministic and config.sync.style != "fixed":
        raise ConfigError(
            f"with sync.style {config.sync.style!r} the clock decides which weights a rollout sees, so that no run "
            "repeats another bit by bit: set deterministic to false, or sync.style to fixed"
        )


def read_tasks(config: RunConfig, algorithm: Algorithm) -> TaskData:
    """The datasets, split. Raises `DatasetError`."""
    tasks: Sequence[Task] = load_tasks(config.train_dataset)
    messages: tuple[str, ...] = ()
    held_out: Sequence[Task] = ()
    if config.eval_dataset is not None:
        held_out = load_tasks(config.eval_dataset)
    elif config.evaluation.hold_out:
        training, held = hold_out(len(tasks), config.seed)
        messages = (
            f"no eval_dataset: {len(held)} of {len(tasks)} tasks are held out for the before/after table "
            "(evaluation.hold_out: false trains on all)",
        )
        held_out, tasks = [tasks[index] for index in held], [tasks[index] for index in training]
    further = {name: load_tasks(dataset) for name, dataset in config.evaluation.further.items()}
    return TaskData(
        training=tasks,
        held_out=held_out[: config.evaluation.max_tasks],
        further=further,
        expert=read_expert_rows(config, algorithm),
        messages=messages,
    )


def _refuse_supervised(config: RunConfig) -> None:
    """Settings of the runs without rollouts mean nothing here, unless an expert's rows are read by them."""
    if config.supervised != SupervisedConfig() and config.expert.dataset is None:
        raise ConfigError(
            f"the settings of supervised have no effect: {config.algorithm.algorithm_type!r} learns from rollouts "
            f"({', '.join(SUPERVISED)} learn from rows)"
        )
