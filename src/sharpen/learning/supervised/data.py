"""Loads the rows of a supervised run, and the `Tutor` that makes lessons of them.

In: a configuration, the folder of a model. Out: the datasets, split; a `Tutor`. The weights of the model are not
loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sharpen.agent.environments.opening import tasks_of
from sharpen.agent.operators.pipeline import filter_tasks
from sharpen.agent.tasks.data import RunData
from sharpen.agent.tasks.order import hold_out
from sharpen.config.public import DatasetConfig, TunerModelConfig
from sharpen.config.rows import load_tasks
from sharpen.config.run import RunConfig, SupervisedConfig
from sharpen.learning.algorithm.supervised import SupervisedAlgorithm
from sharpen.learning.supervised.rows import Data, read_row
from sharpen.types import Task

if TYPE_CHECKING:
    from sharpen.learning.supervised.lessons import Tutor

ROWS_CHECKED_FIRST = 64
"""Number of rows whose format is checked before a model is loaded."""


def load_rows(dataset: DatasetConfig, data: Data, fields: SupervisedConfig) -> Sequence[Task]:
    """Load the rows of a dataset. Raises `DatasetError` if one of the first rows has the wrong format."""
    rows: Sequence[Task] = load_tasks(dataset)
    _check_format(rows, data, fields)
    return rows


def read_data(config: RunConfig, algorithm: SupervisedAlgorithm, has_workflow: bool) -> RunData:
    """Load the datasets of a run. If there are no held-out rows, they are split off the training rows, after the
    operators, which may have made the fields that the algorithm reads."""
    rows, line = filter_tasks(load_tasks(config.train_dataset), config.sampling.task_operators)
    _check_format(rows, algorithm.data, config.supervised)
    messages: tuple[str, ...] = ()
    held_out: Sequence[Task] = ()
    if config.eval_dataset is not None and not has_workflow:
        held_out = load_tasks(config.eval_dataset)
    elif config.evaluation.hold_out:
        num_rows = len(rows)
        rows, held_out = hold_out(rows, config.seed)
        messages = (
            f"{num_rows} row(s) are too few to hold one out: no loss is measured on rows that do not train"
            if not held_out
            else f"{len(held_out)} of {num_rows} rows are held out to measure the loss (evaluation.hold_out: false "
            "trains on all)",
        )
    limit = config.evaluation.max_tasks
    agents = config.environment
    tasks = tasks_of(config.eval_dataset, agents)[:limit] if config.eval_dataset is not None and has_workflow else ()
    further = {name: tasks_of(dataset, agents) for name, dataset in config.evaluation.further.items()}
    return RunData(training=rows, rows=held_out[:limit], tasks=tasks, further=further, messages=(*line, *messages))


def _check_format(rows: Sequence[Task], data: Data, fields: SupervisedConfig) -> None:
    for place in range(min(len(rows), ROWS_CHECKED_FIRST)):
        read_row(rows[place], data, fields)


def make_tutor(model: TunerModelConfig, fields: SupervisedConfig, data: Data, folder: Path) -> Tutor:
    """Make a `Tutor` for the model in `folder`, without loading its weights."""
    from sharpen.engine.families import end_ids_of
    from sharpen.gateway.images import album_of
    from sharpen.gateway.render import Renderer
    from sharpen.learning.supervised.lessons import Tutor
    from sharpen.models.configuration import load_tokenizer

    tokenizer = load_tokenizer(folder)
    thinking = model.enable_thinking
    return Tutor(
        tokenizer=tokenizer,
        renderer=None if data == "texts" else Renderer(tokenizer),
        end_ids=end_ids_of(folder),
        max_model_len=model.max_model_len,
        data=data,
        fields=fields,
        template_kwargs={} if thinking is None else {"enable_thinking": thinking},
        album=album_of(folder),
    )
