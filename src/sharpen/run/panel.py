"""The first lines of a run: what it is and how to watch it, printed before anything heavy is imported.

In: a resolved configuration. Out: a `Display` that shows them, to be used to the end of the run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from sharpen.config.load import ResolvedConfig
from sharpen.config.public import ENVIRONMENT, DatasetConfig, EnvironmentConfig
from sharpen.show.monitor.display import Display


def open_display(resolved: ResolvedConfig) -> Display:
    """Start the display of a run with its panel. The directory is the one that the run will have unless another run
    takes the same name first; the last line of the run tells it again."""
    display = Display(0, sys.stdout)
    display.panel("sharpen", panel_rows(resolved), panel_commands(resolved))
    display.doing("loading libraries")
    return display


def panel_rows(resolved: ResolvedConfig) -> Mapping[str, str]:
    """Return what the panel says, by label."""
    config = resolved.config
    rows = {
        "run directory": str(run_directory(resolved)),
        "model": config.model.model_path,
        "algorithm": config.algorithm.algorithm_type,
        "tasks": _dataset(config.train_dataset, config.environment),
    }
    if config.eval_dataset is not None:
        rows["held-out tasks"] = _dataset(config.eval_dataset, config.environment)
    steps = config.train_dataset.total_steps
    epochs = config.train_dataset.total_epochs
    size = config.algorithm.batch_size
    rows["steps"] = f"{steps}" if steps else f"{epochs} {'epoch' if epochs == 1 else 'epochs'}"
    rows["steps"] += f", {size} tasks in each"
    return rows


def panel_commands(resolved: ResolvedConfig) -> Mapping[str, str]:
    """Return the commands to look at the run."""
    run_dir = run_directory(resolved)
    commands = {"watch": f"sharpen view {run_dir}"}
    if resolved.config.monitor_type == "tensorboard":
        commands[""] = f"tensorboard --logdir {run_dir / 'monitor' / 'tensorboard'}"
    return commands


def run_directory(resolved: ResolvedConfig) -> Path:
    """Return the directory that this run has, or will have."""
    config = resolved.config
    parent = (Path(config.checkpoint_root_dir) / config.project).absolute()
    if config.name is None:
        return parent / resolved.fresh_name
    return parent / config.name


def _dataset(dataset: DatasetConfig, environment: EnvironmentConfig | None) -> str:
    path = dataset.path
    if environment is not None and path == ENVIRONMENT:
        path = " ".join(filter(None, [environment.type, environment.id]))
    return path + (f" ({dataset.split})" if dataset.split else "")
