"""Expert rows, which train together with the rollouts of a step.

In: the configured rows, and a step's batches of rollouts. Out: the same batches with the expert's sequences added, the
certificate's checks of these, and the records of the rows. Rows are read, rendered and weighted as in `sft`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharpen.agent.tasks.order import TaskOrder, distinct
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.supervised import SUPERVISED, SupervisedAlgorithm
from sharpen.learning.experience.draw import Batch
from sharpen.learning.experience.records import EXPERT, TaughtRow
from sharpen.learning.supervised.batches import split, taught_row, weighted
from sharpen.learning.supervised.checks import check_step
from sharpen.learning.supervised.data import load_rows, make_tutor
from sharpen.learning.supervised.lessons import Tutor
from sharpen.types import Check, Task

SFT = SUPERVISED["sft"]


@dataclass(slots=True, kw_only=True)
class ExpertRows:
    """The expert rows of a run. They have their own order of epochs. In the records the id of a row has the prefix
    `expert/`."""

    rows: Sequence[Task]
    order: TaskOrder
    tutor: Tutor
    weighing: SupervisedAlgorithm

    def join(self, batches: Sequence[Batch]) -> tuple[tuple[Batch, ...], tuple[Check, ...], tuple[TaughtRow, ...]]:
        """Draw the rows of a step, spread them evenly over its updates, and return the new batches, the checks, and
        the rows for the records.

        Weights are normalized over the rows of each update. Raises `DatasetError` for a row that cannot be read, or
        that is too long where the settings refuse such rows.
        """
        rows = [self.rows[place] for place in self.order.draw()]
        ids = [f"{EXPERT}{id_}" for id_ in distinct([row.id for row in rows])]
        lessons = [self.tutor.lesson(row, id_) for row, id_ in zip(rows, ids, strict=True)]
        parts = split([lesson for lesson in lessons if lesson.experiences], len(batches))
        parts += [()] * (len(batches) - len(parts))
        updates = [weighted(part, self.weighing) for part in parts]
        joined = tuple(
            replace(batch, experts=update, num_expert_rows=len(part))
            for batch, part, update in zip(batches, parts, updates, strict=True)
        )
        too_long = sum(lesson.too_long for lesson in lessons)
        joined = (replace(joined[0], num_expert_rows_too_long=too_long), *joined[1:])
        taught = tuple(taught_row(row, lesson) for row, lesson in zip(rows, lessons, strict=True))
        return joined, check_step(lessons, updates, self.tutor), taught

    def state(self) -> dict[str, Any]:
        """Return the position in the rows, as JSON."""
        return self.order.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises `ConfigError` if there is none, or if it belongs to other rows."""
        if not state:
            raise ConfigError("cannot continue: the run has had no expert rows so far; use a new run name")
        self.order.restore(state)


def read_expert_rows(config: RunConfig, algorithm: Algorithm) -> Sequence[Task]:
    """Read the expert rows; none if the algorithm has no expert term.

    Raises `DatasetError` if one of the first rows cannot be trained on, `ConfigError` if an update would get no row.
    """
    if algorithm.expert is None:
        return ()
    assert config.expert.dataset is not None, "the algorithm was resolved with its settings"
    if (count := _batch_size(config)) < config.trainer.num_minibatches:
        raise ConfigError(
            f"expert.batch_size is {count}, but a step has {config.trainer.num_minibatches} minibatches "
            "(trainer.num_minibatches), each of which needs a row"
        )
    return load_rows(config.expert.dataset, SFT.data, config.supervised)


def make_expert_rows(config: RunConfig, algorithm: Algorithm, rows: Sequence[Task], folder: Path) -> ExpertRows | None:
    """Return the rows, rendered for the model in `folder`; None if the algorithm has no expert term."""
    if algorithm.expert is None:
        return None
    return ExpertRows(
        rows=rows,
        order=TaskOrder(len(rows), config.seed, _batch_size(config)),
        tutor=make_tutor(config.model, config.supervised, SFT.data, folder),
        weighing=replace(SFT, aggregation=str(algorithm.aggregation), constant_length=algorithm.constant_length),
    )


def _batch_size(config: RunConfig) -> int:
    """Return the number of expert rows of a step."""
    return config.expert.batch_size or config.algorithm.batch_size
