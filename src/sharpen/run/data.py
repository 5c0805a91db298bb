"""The tasks of a run that learns from rollouts.

In: its recipe. Out: `RunData`; raises `DatasetError` for data that cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from sharpen.agent.environments.opening import tasks_of
from sharpen.agent.operators.pipeline import filter_tasks
from sharpen.agent.tasks.data import RunData
from sharpen.agent.tasks.order import hold_out
from sharpen.learning.recipe import RolloutRecipe
from sharpen.run.expert import read_expert_rows
from sharpen.types import Task


def read_expert_only(recipe: RolloutRecipe) -> RunData:
    """What a trainer reads itself whose tasks are the explorer's: an expert's rows, if there are any."""
    line = "mode train: tasks, agent and judge are the explorer's; nothing is evaluated here (sharpen eval does that)"
    return RunData(training=(), expert=read_expert_rows(recipe.config, recipe.algorithm), messages=(line,))


def read_tasks(recipe: RolloutRecipe) -> RunData:
    """Read the datasets and split off the held-out tasks."""
    config = recipe.config
    tasks: Sequence[Task] = tasks_of(config.train_dataset, config.environment)
    messages: tuple[str, ...] = ()
    held_out: Sequence[Task] = ()
    if config.eval_dataset is not None:
        held_out = tasks_of(config.eval_dataset, config.environment)
    elif config.evaluation.hold_out and config.mode == "both":  # an explorer evaluates nothing
        num_tasks = len(tasks)
        tasks, held_out = hold_out(tasks, config.seed)
        messages = (
            f"no eval_dataset, and {num_tasks} task(s) are too few to hold one out: nothing is evaluated"
            if not held_out
            else f"no eval_dataset: {len(held_out)} of {num_tasks} tasks are held out for the before/after table "
            "(evaluation.hold_out: false trains on all)",
        )
    tasks, line = filter_tasks(tasks, config.sampling.task_operators)
    return RunData(
        training=tasks,
        tasks=held_out[: config.evaluation.max_tasks],
        further={name: tasks_of(dataset, config.environment) for name, dataset in config.evaluation.further.items()},
        expert=read_expert_rows(config, recipe.algorithm),
        messages=(*messages, *line),
    )
