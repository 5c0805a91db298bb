"""Metrics of a run, to every place that keeps them: `metrics.jsonl` always, and TensorBoard, W&B, MLflow or SwanLab.

In: a step and its numbers, named `reward/mean`, `loss/...`, `time/...`, `tokens/...`, `eval/...`. Out: the files of the
run directory. A run that is resumed at step N first forgets what it had written of later steps. A place beside
`metrics.jsonl` that refuses is said once and counted: no run ends by it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from sharpen.config.extras import install_command
from sharpen.errors import ConfigError, JournalError


class Sink(Protocol):
    """A place that keeps metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep these numbers; on return they survive a kill of the process where the sink is a file."""

    def close(self) -> None:
        """Finish writing."""


class Beside:
    """A place beside `metrics.jsonl`, which may refuse: a service that is away, a full disk. `open_` makes it, `say` is
    told of the first refusal; `refused` counts those of `asked` requests that failed."""

    def __init__(self, name: str, open_: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._sink: Sink | None = None
        self.asked = 0
        self.refused = 0
        with self._asking("be opened"):
            self._sink = open_()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers with their step, if they are taken."""
        with self._asking(f"take the numbers of step {step}"):
            if self._sink is None:
                raise ConnectionError("it could not be opened")
            self._sink.log(step, metrics)

    def close(self) -> None:
        """Finish, as far as it was opened."""
        if self._sink is not None:
            with self._asking("be closed"):
                self._sink.close()

    @property
    def line(self) -> str:
        """What was refused over the run; empty if nothing was."""
        if not self.refused:
            return ""
        return f"{self._name} refused {self.refused} of {self.asked} requests: metrics.jsonl has every number"

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        self.asked += 1
        try:
            yield
        except Exception as error:  # the boundary to a package and a service that are not ours
            self.refused += 1
            if self.refused == 1:
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._say(
                    f"  ! {self._name} could not {what} ({type(error).__name__}: {said}): the run goes on, "
                    "metrics.jsonl has every number; further refusals are counted"
                )


class Monitor:
    """Hands each step's metrics to `metrics.jsonl` and to the place `beside` it."""

    def __init__(self, file: JsonlSink, beside: Beside | None = None) -> None:
        self._file = file
        self._beside = beside

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log numbers of one step. Every name has a namespace (`reward/mean`); one step may be logged in parts."""
        for name in metrics:
            assert "/" in name, f"the metric {name!r} has no namespace"
        numbers = {name: float(value) for name, value in metrics.items()}
        if self._beside is not None and self._beside.refused:
            numbers["monitor/refused"] = float(self._beside.refused)
        self._file.log(step, numbers)
        if self._beside is not None:
            self._beside.log(step, numbers)

    @property
    def line(self) -> str:
        """What the place beside refused; empty if nothing."""
        return "" if self._beside is None else self._beside.line

    def close(self) -> None:
        """Finish writing in both."""
        self._file.close()
        if self._beside is not None:
            self._beside.close()


class JsonlSink:
    """`metrics.jsonl`: one line for each call of `log`, `{"step": 3, "time": <Unix time>, "reward/mean": 0.5}`.

    A number that is not finite is null. With `resume_step`, lines up to that step stay; later ones, and a line that a
    kill cut short, go. What cannot be written raises `JournalError`: the run's own record is never given up in silence.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        if resume_step is not None and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_kept(line, resume_step)]
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(temporary, path)
        self._file: IO[str] = path.open("w" if resume_step is None else "a", encoding="utf-8")
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and flush it."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):  # what it holds back would fail again
                self._file.close()
            raise JournalError(
                f"the metrics of step {step} could not be written to {self._path}: {error}. If the disk is full, free "
                "some space and continue the run from its last checkpoint"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_kept(line: str, resume_step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= resume_step)
    except (ValueError, TypeError, KeyError):  # cut short by a kill
        return False


class WandbSink:
    """Weights & Biases; `module` is the imported `wandb`. A run of the same project and name is continued."""

    def __init__(self, module: Any, run_dir: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._run = module.init(
            project=project,
            name=name,
            id=_identity(f"{project}-{name}"),
            resume="allow",
            dir=str(run_dir / "monitor"),
            config=dict(config),
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


class SwanlabSink:
    """SwanLab; `module` is the imported `swanlab`. A run of the same project and name is continued where SwanLab keeps
    it in the cloud."""

    def __init__(self, module: Any, run_dir: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._run = module.init(
            project=_identity(project),
            name=name,
            id=_identity(f"{project}-{name}"),
            resume="allow",
            log_dir=str(run_dir / "monitor" / "swanlab"),
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers with their step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def _identity(name: str) -> str:
    """The name with the letters that services take in identities."""
    return "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "-_" else "-" for letter in name)


def open_monitor(
    run_dir: Path,
    monitor_type: str,
    *,
    project: str,
    name: str,
    config: Mapping[str, Any],
    say: Callable[[str], None],
    resume_step: int | None = None,
) -> Monitor:
    """Open `metrics.jsonl` and the chosen place. `config` holds flat settings to show beside the run; `say` is told if
    the place refuses.

    Raises `ConfigError` if the chosen place's package is not installed.
    """
    (run_dir / "monitor").mkdir(parents=True, exist_ok=True)
    shown: str
    open_: Callable[[], Sink]
    if monitor_type == "tensorboard":
        from sharpen.monitor.tensorboard import TensorBoardSink

        shown = "TensorBoard"
        open_ = partial(TensorBoardSink, run_dir / "monitor" / "tensorboard", resume_step)
    elif monitor_type == "wandb":
        shown, open_ = "W&B", partial(WandbSink, _import_extra("wandb"), run_dir, project, name, config)
    elif monitor_type == "mlflow":
        shown, open_ = "MLflow", partial(MlflowSink, _import_extra("mlflow"), run_dir, project, name, config)
    elif monitor_type == "swanlab":
        shown, open_ = "SwanLab", partial(SwanlabSink, _import_extra("swanlab"), run_dir, project, name, config)
    else:
        raise ConfigError(f"monitor_type must be tensorboard, wandb, mlflow or swanlab, but {monitor_type!r} came")
    return Monitor(JsonlSink(run_dir / "metrics.jsonl", resume_step), Beside(shown, open_, say))


def check_monitor(monitor_type: str) -> None:
    """Raise `ConfigError` now, before anything is loaded, if the package of this monitor type is not installed."""
    if monitor_type in ("wandb", "mlflow", "swanlab") and importlib.util.find_spec(monitor_type) is None:
        raise ConfigError(
            f"monitor_type {monitor_type!r} needs the package {monitor_type}: {install_command(monitor_type)}"
        )


def _import_extra(package: str) -> Any:
    check_monitor(package)
    return importlib.import_module(package)
