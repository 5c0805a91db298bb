"""Parts that runs with and without rollouts are put together from (`tuning`, `supervised.run`).

In: a run's configuration and rows, the model that serves. Out: `Opened`, what a run has before anything is loaded; its
monitor, its evaluator.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agenttune.config.load import Resolved, value_leaves
from agenttune.config.run import RunConfig
from agenttune.execution.threads import let_idle_workers_sleep
from agenttune.forecast import before_run
from agenttune.interrupts import stop_signals
from agenttune.monitor.display import Display
from agenttune.monitor.metrics import Monitor, open_monitor
from agenttune.monitor.stream import lasting_output
from agenttune.tasks.order import Order
from agenttune.tasks.selection import make_order
from agenttune.types import Task

if TYPE_CHECKING:
    from agenttune.evaluate import Evaluator
    from agenttune.execution.run_directory import RunDirectory
    from agenttune.execution.start import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a run has before anything is loaded: its settings, its directory, the order of its rows, the display."""

    config: RunConfig
    directory: RunDirectory
    order: Order
    total_steps: int
    display: Display


@contextlib.contextmanager
def open_run(
    resolved: Resolved, config_path: Path | None, rows: Sequence[Task], lines: Sequence[str]
) -> Iterator[Opened]:
    """Make the run's directory, or find it again, and say what is notable: `lines` too. Raises as `open_run_directory`
    and `before_run`."""
    let_idle_workers_sleep()
    from agenttune.execution.run_directory import open_run_directory

    config = resolved.config
    directory = open_run_directory(resolved, config_path)
    order = make_order(rows, config.sampling, seed=config.seed, batch_size=config.algorithm.batch_size)
    total_steps = config.train_dataset.total_steps or order.num_batches(config.train_dataset.total_epochs)
    with stop_signals(), lasting_output(), contextlib.closing(Display(total_steps, sys.stdout)) as display:
        for line in (*resolved.notices, *resolved.overrides, *lines):
            display.message(line)
        for line in before_run(config, directory.path):
            display.message(line)
        yield Opened(config=config, directory=directory, order=order, total_steps=total_steps, display=display)


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
    config: RunConfig, serving: Served, tasks: Sequence[Task], further: Mapping[str, Sequence[Task]], display: Display
) -> Evaluator:
    """Evaluates the model that serves on `tasks`, and on the `further` sets by name."""
    from agenttune.evaluate import Evaluator

    return Evaluator(
        config=config,
        runner=serving.runner,
        modes=serving.modes,
        tasks=tasks,
        further=further,
        progress=display.evaluation,
        message=display.message,
    )
