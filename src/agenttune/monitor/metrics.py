"""Metrics of a run, to every place that keeps them: `metrics.jsonl` always, and TensorBoard, W&B or MLflow.

In: a step and its numbers, named `reward/mean`, `loss/...`, `time/...`, `tokens/...`, `eval/...`. Out: the files of the
run directory. A run that is resumed at step N first forgets what it had written of later steps.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from agenttune.errors import ConfigError


class Sink(Protocol):
    """A place that keeps metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep these numbers; on return they survive a kill of the process where the sink is a file."""

    def close(self) -> None:
        """Finish writing."""


class Monitor:
    """Hands each step's metrics to every sink."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log numbers of one step. Every name has a namespace (`reward/mean`); one step may be logged in parts."""
        for name in metrics:
            assert "/" in name, f"the metric {name!r} has no namespace"
        numbers = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.log(step, numbers)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


class JsonlSink:
    """`metrics.jsonl`: one line for each call of `log`, `{"step": 3, "time": <Unix time>, "reward/mean": 0.5}`.

    A number that is not finite is null. With `resume_step`, lines up to that step stay; later ones, and a line that a
    kill cut short, go.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        if resume_step is not None and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_kept(line, resume_step)]
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(temporary, path)
        self._file: IO[str] = path.open("w" if resume_step is None else "a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and flush it."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_kept(line: str, resume_step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= resume_step)
    except json.JSONDecodeError:  # cut short by a kill
        return False


class WandbSink:
    """Weights & Biases; `module` is the imported `wandb`. A run of the same project and name is continued."""

    def __init__(self, module: Any, run_dir: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        identity = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in f"{project}-{name}")
        self._run = module.init(
            project=project, name=name, id=identity, resume="allow", dir=str(run_dir / "monitor"), config=dict(config)
        )
        # with a step metric of our own a resumed run may log steps that W&B has seen
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers with their step."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class MlflowSink:
    """MLflow; `module` is the imported `mlflow`. The run's id is kept in the run directory for a resume."""

    def __init__(self, module: Any, run_dir: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._module = module
        identity = run_dir / "monitor" / "mlflow_run_id"
        module.set_experiment(project)
        if identity.exists():
            module.start_run(run_id=identity.read_text(encoding="utf-8").strip())
        else:
            run = module.start_run(run_name=name)
            identity.write_text(f"{run.info.run_id}\n", encoding="utf-8")
            module.log_params(dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers with their step."""
        self._module.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        """End the run."""
        self._module.end_run()


def open_monitor(
    run_dir: Path,
    monitor_type: str,
    *,
    project: str,
    name: str,
    config: Mapping[str, Any],
    resume_step: int | None = None,
) -> Monitor:
    """Open `metrics.jsonl` and the chosen place. `config` holds flat settings to show beside the run.

    Raises `ConfigError` if the chosen place's package is not installed.
    """
    (run_dir / "monitor").mkdir(parents=True, exist_ok=True)
    chosen: Sink
    if monitor_type == "tensorboard":
        from agenttune.monitor.tensorboard import TensorBoardSink

        chosen = TensorBoardSink(run_dir / "monitor" / "tensorboard", resume_step)
    elif monitor_type == "wandb":
        chosen = WandbSink(_import_extra("wandb"), run_dir, project, name, config)
    elif monitor_type == "mlflow":
        chosen = MlflowSink(_import_extra("mlflow"), run_dir, project, name, config)
    else:
        raise ConfigError(f"monitor_type must be tensorboard, wandb or mlflow, but {monitor_type!r} came")
    return Monitor([JsonlSink(run_dir / "metrics.jsonl", resume_step), chosen])


def check_monitor(monitor_type: str) -> None:
    """Raise `ConfigError` now, before anything is loaded, if the package of this monitor type is not installed."""
    import importlib.util

    if monitor_type in ("wandb", "mlflow") and importlib.util.find_spec(monitor_type) is None:
        raise ConfigError(_missing(monitor_type))


def _import_extra(package: str) -> Any:
    import importlib

    check_monitor(package)
    return importlib.import_module(package)


def _missing(package: str) -> str:
    return f"monitor_type {package!r} needs the package {package}: pip install 'agenttune[{package}]'"
