"""Parts that runs with and without rollouts are put together from (`tuning`, `supervised.run`).

In: a run's configuration and rows, the model that serves. Out: `Opened`, what a run has before anything is loaded; its
monitor, its evaluator; at its end the models that it leaves to choose from.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sharpen.config.load import Resolved, value_leaves
from sharpen.config.run import RunConfig
from sharpen.execution.identity import model_identity, rows_identity
from sharpen.execution.model_files import model_folder
from sharpen.execution.threads import let_idle_workers_sleep
from sharpen.forecast import before_run
from sharpen.interrupts import stop_signals
from sharpen.monitor.display import Display
from sharpen.monitor.metrics import Monitor, open_monitor
from sharpen.monitor.stream import lasting_output
from sharpen.monitor.verdict import Candidates, Checkpoint
from sharpen.tasks.order import Order
from sharpen.tasks.selection import make_order
from sharpen.types import Group, Task

if TYPE_CHECKING:
    from sharpen.evaluate import Evaluator
    from sharpen.execution.place import Serving
    from sharpen.execution.run_directory import RunDirectory
    from sharpen.experience.journal import Journal

T = TypeVar("T")


class Transcripts:
    """The rollouts of evaluations, in a journal of their own at `path`, made when there is something to keep."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal: Journal | None = None

    def add(self, group: Group) -> None:
        """Keep a group. Raises `JournalError` if an earlier one could not be written."""
        if self._journal is None:
            from sharpen.experience.journal import Journal

            self._journal = Journal(self._path)
        self._journal.add(group)

    def close(self) -> None:
        """Write what is left."""
        if self._journal is not None:
            self._journal.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a run has before anything is loaded: its settings, its directory, the order of its rows, the display."""

    config: RunConfig
    directory: RunDirectory
    order: Order
    total_steps: int
    display: Display
    transcripts: Transcripts


@contextlib.contextmanager
def open_run(
    resolved: Resolved, config_path: Path | None, rows: Mapping[str, Sequence[Task]], lines: Sequence[str]
) -> Iterator[Opened]:
    """Make the run's directory, or find it again, and say what is notable: `lines` too. Of `rows`, `train_dataset` are
    those to train on; all of them are known again when the run goes on. Raises as `open_run_directory` and
    `before_run`."""
    let_idle_workers_sleep()
    from sharpen.execution.run_directory import open_run_directory

    config = resolved.config
    identities = {name: rows_identity(some) for name, some in rows.items() if some}
    identities["model"] = model_identity(model_folder(config.model.model_path))
    order = make_order(rows["train_dataset"], config.sampling, seed=config.seed, batch_size=config.algorithm.batch_size)
    total_steps = config.train_dataset.total_steps or order.num_batches(config.train_dataset.total_epochs)
    with (
        open_run_directory(resolved, config_path, identities, rows["train_dataset"]) as directory,
        stop_signals(),
        lasting_output(),
        contextlib.closing(Display(total_steps, sys.stdout)) as display,
        contextlib.closing(Transcripts(directory.evaluations)) as transcripts,
    ):
        for line in (*resolved.notices, *resolved.overrides, *directory.notes, *lines):
            display.message(line)
        for line in before_run(config, directory.path):
            display.message(line)
        yield Opened(
            config=config,
            directory=directory,
            order=order,
            total_steps=total_steps,
            display=display,
            transcripts=transcripts,
        )


def make_monitor(config: RunConfig, directory: RunDirectory, step: int, display: Display) -> Monitor:
    """The configured monitor; a continued run goes on after `step`, `display` tells if the monitor refuses."""
    return open_monitor(
        directory.path,
        config.monitor_type,
        project=config.project,
        name=directory.path.name,
        config={".".join(place): value for place, value in value_leaves(config).items()},
        say=display.message,
        resume_step=step if directory.checkpoint is not None else None,
    )


def make_evaluator(
    opened: Opened, serving: Serving, tasks: Sequence[Task], further: Mapping[str, Sequence[Task]]
) -> Evaluator:
    """Evaluates the model that serves on `tasks`, and on the `further` sets by name."""
    from sharpen.evaluate import Evaluator

    return Evaluator(
        config=opened.config,
        runner=serving.runner,
        modes=serving.modes,
        tasks=tasks,
        further=further,
        progress=opened.display.evaluation,
        message=opened.display.message,
        keep=opened.transcripts.add,
    )


def models_left(
    directory: RunDirectory, original: str, *, before: T | None, after: T | None, best: T | None, num_evaluated: int
) -> Candidates[T]:
    """The models that a run leaves, with what was measured of each: the `original`, the last step, and the checkpoint
    `best` where that is another one; `num_evaluated` counts the evaluations of checkpoints."""
    from sharpen.trainer.checkpoint import pointed, step_of

    latest, at_best = pointed(directory.path, "latest"), pointed(directory.path, "best")
    assert latest is not None, "the last step is always saved"
    earlier = None
    if best is not None and at_best is not None and at_best != latest:
        earlier = Checkpoint(step=step_of(at_best), folder=at_best, found=best)
    return Candidates(
        original=original,
        before=before,
        last=Checkpoint(step=step_of(latest), folder=latest, found=after),
        best=earlier,
        num_earlier=max(1, num_evaluated - (after is not None)),
    )


def best_of(directory: RunDirectory, models: Candidates[T], folder: Path) -> Path:
    """The model that evaluated best: the checkpoint `best`, else the original (in `folder`) where checkpoints were
    compared with it, else the last step."""
    from sharpen.trainer.checkpoint import pointed

    compared = models.before is not None and models.last.found is not None
    return pointed(directory.path, "best") or (folder if compared else models.last.folder)
