"""The tasks of a run that learns from rollouts.

In: its configuration and algorithm. Out: `TaskData`, or `DatasetError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sharpen.algorithm.presets import Algorithm
from sharpen.config.run import RunConfig
from sharpen.supervised.expert import read_expert_rows
from sharpen.tasks.order import hold_out
from sharpen.tasks.source import load_tasks
from sharpen.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The tasks to train on, those held out, further sets by name, an expert's rows, and what to tell the user."""

    training: Sequence[Task]
    held_out: Sequence[Task]
    further: Mapping[str, Sequence[Task]]
    expert: Sequence[Task]
    messages: tuple[str, ...]


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
