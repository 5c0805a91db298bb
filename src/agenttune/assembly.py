"""Parts that runs with and without rollouts are put together from (`tuning`, `supervised.run`).

In: a run's configuration and directory, the model that serves. Out: its monitor, its evaluator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agenttune.config.load import value_leaves
from agenttune.config.run import RunConfig
from agenttune.monitor.display import Display
from agenttune.monitor.metrics import Monitor, open_monitor
from agenttune.types import Task

if TYPE_CHECKING:
    from agenttune.evaluate import Evaluator
    from agenttune.execution.run_directory import RunDirectory
    from agenttune.execution.start import Served


def make_monitor(config: RunConfig, directory: RunDirectory, step: int) -> Monitor:
    """The configured monitor; a continued run goes on after `step`."""
    return open_monitor(
        directory.path,
        config.monitor_type,
        project=config.project,
        name=directory.path.name,
        config={".".join(place): value for place, value in value_leaves(config).items()},
        resume_step=step if directory.checkpoint is not None else None,
    )


def make_evaluator(
    serving: Served, tasks: Sequence[Task], further: Mapping[str, Sequence[Task]], display: Display
) -> Evaluator:
    """Evaluates the model that serves on `tasks`, and on the `further` sets by name."""
    from agenttune.evaluate import Evaluator

    return Evaluator(
        runner=serving.runner,
        modes=serving.modes,
        tasks=tasks,
        further=further,
        progress=display.evaluation,
        message=display.message,
    )
