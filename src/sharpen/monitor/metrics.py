"""Write the metrics of a run: always to `metrics.jsonl`, and to TensorBoard, W&B, MLflow, SwanLab or Trackio.

In: a step and its numbers, named `reward/mean`, `loss/...`, `time/...`, `tokens/...`, `eval/...`. Out: the files of the
run directory. A run resumed at step N first removes what it had written about later steps. Failures of the sink other
than `metrics.jsonl` are reported once and counted; they never end a run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, get_args, runtime_checkable

from sharpen.config.extras import install_command
from sharpen.config.public import MonitorType
from sharpen.config.secrets import hide
from sharpen.errors import ConfigError, JournalError
from sharpen.files import write_whole
from sharpen.monitor.services import SERVICES, Rows


class Sink(Protocol):
    """A destination for metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write these numbers. If the sink is a file, they survive a kill of the process once this returns."""

    def close(self) -> None:
        """Finish writing."""


@runtime_checkable
class TakesSamples(Protocol):
    """A destination that can also show texts."""

    def sample(self, step: int, text: str) -> None:
        """Show what the model said in a step, in Markdown."""


@runtime_checkable
class TakesRollouts(Protocol):
    """A destination that can also show tables."""

    def rollouts(self, step: int, rows: Rows) -> None:
        """Show rollouts of a step, a row each."""


class TolerantSink:
    """A sink whose failures do not stop the run: a service may be down, a disk full. `open_` opens it, and `say` is
    called with a message at the first failure. `refused` of the `asked` requests failed."""

    def __init__(self, name: str, open_: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._sink: Sink | None = None
        self.asked = 0
        self.refused = 0
        with self._attempt("be opened"):
            self._sink = open_()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers of a step, if the sink accepts them."""
        with self._attempt(f"take the numbers of step {step}"):
            if self._sink is None:
                raise ConnectionError("it could not be opened")
            self._sink.log(step, metrics)

    def sample(self, step: int, text: str) -> None:
        """Show a text of a step, if the sink takes some."""
        if isinstance(self._sink, TakesSamples):
            with self._attempt(f"take the sample of step {step}"):
                self._sink.sample(step, text)

    def rollouts(self, step: int, rows: Rows) -> None:
        """Show rollouts of a step, if the sink takes tables."""
        if isinstance(self._sink, TakesRollouts):
            with self._attempt(f"take the rollouts of step {step}"):
                self._sink.rollouts(step, rows)

    def close(self) -> None:
        """Finish writing, if the sink was opened."""
        if self._sink is not None:
            with self._attempt("be closed"):
                self._sink.close()

    @property
    def line(self) -> str:
        """How many requests were refused over the run, as text; empty if none."""
        if not self.refused:
            return ""
        return f"{self._name} refused {self.refused} of {self.asked} requests: metrics.jsonl has every number"

    @contextlib.contextmanager
    def _attempt(self, what: str) -> Iterator[None]:
        self.asked += 1
        try:
            yield
        except Exception as error:  # the boundary to a package and a service that are not ours
            self.refused += 1
            if self.refused == 1:
                reason = hide((str(error).strip() or type(error).__name__).splitlines()[0])
                self._say(
                    f"  ! {self._name} could not {what} ({type(error).__name__}: {reason}): the run continues, "
                    "metrics.jsonl has every number; further failures are counted"
                )


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
        """How many requests the other sink refused, as text; empty if none."""
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
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_kept(line, resume_step)]
            write_whole(path, "".join(f"{line}\n" for line in kept))
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


def _is_kept(line: str, resume_step: int) -> bool:
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
        from sharpen.monitor.tensorboard import TensorBoardSink

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
