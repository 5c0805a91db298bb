"""Write the metrics of a run: always to `metrics.jsonl`, and to TensorBoard, W&B, MLflow, SwanLab or Trackio.

In: a step and its numbers, named `reward/mean`, `loss/...`, `time/...`, `tokens/...`, `eval/...`. Out: the files of the
run directory. A run resumed at step N first removes what it had written about later steps. Failures of the sink other
than `metrics.jsonl` never end or hold a run (`monitor.tolerant`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, get_args

from sharpen.config.extras import install_command
from sharpen.config.public import MonitorType
from sharpen.errors import ConfigError, JournalError
from sharpen.files import write_whole
from sharpen.show.monitor.services import SERVICES, Rows
from sharpen.show.monitor.tolerant import Sink, TolerantSink


class Monitor:
    """Passes each step's metrics to `metrics.jsonl` and to one more sink."""

    def __init__(self, file: JsonlSink, sink: TolerantSink | None = None) -> None:
        self._file = file
        self._sink = sink

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log numbers of one step. Every name has a namespace (`reward/mean`); a step may be logged in several
        calls."""
        for name in metrics:
            assert "/" in name, f"the metric {name!r} has no namespace"
        numbers = {name: float(value) for name, value in metrics.items()}
        if self._sink is not None and self._sink.refused:
            numbers["monitor/refused"] = float(self._sink.refused)
        self._file.log(step, numbers)
        if self._sink is not None:
            self._sink.log(step, numbers)

    def sample(self, step: int, text: str) -> None:
        """Show what the model said in a step, where texts are shown on this machine: they hold prompts."""
        if self._sink is not None and text:
            self._sink.sample(step, text)

    def rollouts(self, step: int, rows: Rows) -> None:
        """Show rollouts of a step as a table where there are tables. They hold prompts: whoever wants them there says
        so (`monitor_rollouts`)."""
        if self._sink is not None and rows:
            self._sink.rollouts(step, rows)

    @property
    def line(self) -> str:
        """What the other sink refused or missed, as text; empty if nothing."""
        return "" if self._sink is None else self._sink.line

    def close(self) -> None:
        """Finish writing in both."""
        self._file.close()
        if self._sink is not None:
            self._sink.close()


class JsonlSink:
    """`metrics.jsonl`: one line for each call of `log`, `{"step": 3, "time": <Unix time>, "reward/mean": 0.5}`.

    A number that is not finite becomes null. With `resume_step`, lines up to that step are kept; later lines, and one
    cut off by a kill, are removed. A failed write raises `JournalError`: the run's own record is never lost silently.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        if resume_step is not None and path.exists():
            kept = [line for line in path.read_bytes().split(b"\n") if _is_kept(line, resume_step)]
            write_whole(path, b"".join(line + b"\n" for line in kept))
        self._file: IO[str] = path.open("w" if resume_step is None else "a", encoding="utf-8")
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and flush it."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):  # closing flushes the buffer, which would fail again
                self._file.close()
            raise JournalError(
                f"the metrics of step {step} could not be written to {self._path}: {error}. If the disk is full, free "
                "some space and continue the run from its last checkpoint"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_kept(line: bytes, resume_step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= resume_step)
    except (ValueError, TypeError, KeyError):  # cut off by a kill
        return False


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
    """Open `metrics.jsonl` and the chosen sink. `config` holds flat settings to show with the run; `say` is called if
    the sink fails.

    Raises `ConfigError` if the package of the sink is not installed.
    """
    (run_dir / "monitor").mkdir(parents=True, exist_ok=True)
    title: str
    open_: Callable[[], Sink]
    if monitor_type == "tensorboard":
        from sharpen.show.monitor.tensorboard import TensorBoardSink

        title = "TensorBoard"
        open_ = partial(TensorBoardSink, run_dir / "monitor" / "tensorboard", resume_step, config)
    elif monitor_type in SERVICES:
        check_monitor(monitor_type)
        title, service = SERVICES[monitor_type]
        open_ = partial(service, importlib.import_module(monitor_type), run_dir, project, name, config)
    else:
        raise ConfigError(f"monitor_type must be one of {', '.join(get_args(MonitorType))}, got {monitor_type!r}")
    return Monitor(JsonlSink(run_dir / "metrics.jsonl", resume_step), TolerantSink(title, open_, say))


def check_monitor(monitor_type: str, rollouts: int = 0) -> None:
    """Raise `ConfigError` if the package of this monitor type is not installed, or if it has no tables for the rollouts
    that it is to show. Called before anything is loaded."""
    if monitor_type != "tensorboard" and importlib.util.find_spec(monitor_type) is None:
        raise ConfigError(
            f"monitor_type {monitor_type!r} needs the package {monitor_type}: {install_command(monitor_type)}"
        )
    if rollouts and monitor_type not in SERVICES:
        raise ConfigError(
            f"monitor_rollouts is {rollouts}, but monitor_type {monitor_type!r} has no tables: leave it out (the best "
            f"and the worst rollout of each step are shown as text), or set monitor_type to {', '.join(SERVICES)}"
        )
