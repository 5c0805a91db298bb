"""The source of a run that learns from rows: draws them, makes them into token sequences and trains on these.

In: how far the run is. Out: a `StepOutcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sharpen.agent.tasks.order import Order, distinct
from sharpen.errors import DatasetError
from sharpen.learning.experience.journal import Journal
from sharpen.learning.recipe import RowRecipe
from sharpen.learning.supervised.batches import split, taught_row, weighted
from sharpen.learning.supervised.checks import check_step
from sharpen.learning.supervised.lessons import Lesson, Tutor
from sharpen.learning.trainer.work import Minibatch
from sharpen.placement.trainers import AnyTrainer
from sharpen.run.progress import Progress
from sharpen.run.source import StepOutcome, record_checks
from sharpen.show.monitor.display import Display
from sharpen.types import Check, Experience, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """The data of a step: the rows drawn, their lessons, and the sequences of each update."""

    rows: Sequence[Task]
    lessons: Sequence[Lesson]
    updates: Sequence[Sequence[Experience]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Satisfies `run.source.Source`. `serve` publishes the trainer's weights to the engine, if the agent is
    evaluated."""

    recipe: RowRecipe
    rows: Sequence[Task]
    order: Order
    tutor: Tutor
    trainer: AnyTrainer
    journal: Journal
    display: Display
    serve: Callable[[], None]

    def gather(self, progress: Progress) -> RowStep:
        """Draw the rows of a step. Raises `DatasetError` if none of them can be trained on, or one cannot be read."""
        rows = [self.rows[place] for place in self.order.draw()]
        # a batch larger than the dataset repeats rows: each copy needs its own id
        names = distinct([row.id for row in rows])
        lessons = [self.tutor.lesson(row, name) for row, name in zip(rows, names, strict=True)]
        parts = split(lessons, self.recipe.config.trainer.num_minibatches)
        updates = [update for part in parts if (update := weighted(part, self.recipe.algorithm))]
        if not updates:
            raise DatasetError(
                f"none of the {len(rows)} rows of step {progress.step + 1} can be trained on: "
                f"{sum(lesson.too_long for lesson in lessons)} are longer than model.max_model_len "
                f"({self.tutor.max_model_len}), the others have no token to train on"
            )
        return RowStep(rows=rows, lessons=lessons, updates=updates)

    def train(self, gathered: RowStep, progress: Progress) -> StepOutcome:
        """Train on the rows. Raises as `Trainer.train_step`, and `CertificateError`."""
        config, lessons, step = self.recipe.config, gathered.lessons, progress.step + 1
        checks: tuple[Check, ...] = check_step(lessons, gathered.updates, self.tutor)
        record_checks(checks, step, self.journal, self.display, stop=config.certificate.on_violation == "stop")
        trained = self.trainer.train_step([Minibatch(experiences=update) for update in gathered.updates], step=step)
        kept, too_long = sum(bool(one.experiences) for one in lessons), sum(one.too_long for one in lessons)
        empty = len(lessons) - kept - too_long
        return StepOutcome(
            metrics={
                **{f"trainer/{name}": value for name, value in trained.as_dict().items()},
                "batch/rows": float(kept),
                "batch/rows_too_long": float(too_long),
                "batch/rows_empty": float(empty),
                **{f"certificate/{check.name}_broken": float(check.broken) for check in checks},
                "time/train_s": trained.seconds,
            },
            tokens=trained.sequence_tokens,
            counts={
                "rows": kept,
                "rows_too_long": too_long,
                "trained_tokens": trained.trained_tokens,
                "computed_tokens": trained.computed_tokens,
            },
            position={"order": self.order.state()},
            checks=checks,
            taught=[taught_row(row, lesson) for row, lesson in zip(gathered.rows, lessons, strict=True)],
            loss=trained.values["loss"],
            notes=[_note(len(lessons), too_long, empty, self.tutor.max_model_len)],
        )

    def close(self) -> None:
        """Nothing is in flight."""


def _note(num_rows: int, too_long: int, empty: int, max_model_len: int) -> str:
    """Return a note about rows of the step left out, if any."""
    notes = [f"{too_long} of {num_rows} rows left out: longer than {max_model_len} tokens"] if too_long else []
    return "; ".join(notes + ([f"{empty} of {num_rows} rows have no token to train on"] if empty else []))
