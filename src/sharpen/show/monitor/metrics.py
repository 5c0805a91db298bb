"""Write the metrics of a run: always to `metrics.jsonl`, and to TensorBoard, a service, or a monitor of somebody's own.

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
from typing import IO

from sharpen.config.doors import find_part
from sharpen.config.extras import install_command
from sharpen.contracts import MonitoredRun, Rows, Sink
from sharpen.errors import ConfigError, JournalError
from sharpen.files import write_whole
from sharpen.show.monitor.services import SERVICES
from sharpen.show.monitor.tolerant import TolerantSink

MakeSink = Callable[[MonitoredRun], Sink]


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


def open_monitor(run: MonitoredRun, monitor_type: str, say: Callable[[str], None]) -> Monitor:
    """Open `metrics.jsonl` and the chosen monitor; `say` is called if that fails. Raises what `monitor_of` raises."""
    title, make = monitor_of(monitor_type)
    (run.run_dir / "monitor").mkdir(parents=True, exist_ok=True)
    return Monitor(
        JsonlSink(run.run_dir / "metrics.jsonl", run.resume_step), TolerantSink(title, partial(make, run), say)
    )


def monitor_of(monitor_type: str, rollouts: int = 0) -> tuple[str, MakeSink]:
    """Return the title of a monitor, and what makes its sink. Called before anything is loaded.

    Raises `ConfigError` for a name that nobody has, a package that is not installed, a class that is no monitor, and
    one without tables for the `rollouts` that it is to show.
    """
    title, make = OURS.get(monitor_type) or _theirs(monitor_type)
    if monitor_type in SERVICES and importlib.util.find_spec(monitor_type) is None:
        raise ConfigError(
            f"monitor_type {monitor_type!r} needs the package {monitor_type}: {install_command(monitor_type)}"
        )
    has_tables = monitor_type in SERVICES if monitor_type in OURS else hasattr(make, "rollouts")
    if rollouts and not has_tables:
        raise ConfigError(
            f"monitor_rollouts is {rollouts}, but monitor_type {monitor_type!r} has no tables: leave it out (the best "
            f"and the worst rollout of each step are shown as text), or set monitor_type to {', '.join(SERVICES)}"
        )
    return title, make


def _theirs(monitor_type: str) -> tuple[str, MakeSink]:
    part = find_part("monitors", monitor_type, OURS)
    missing = [name for name in ("log", "close") if not callable(getattr(part, name, None))]
    if not isinstance(part, type) or missing:
        raise ConfigError(
            f"monitor_type {monitor_type!r} is {part!r}, which is no monitor: it must be a class with the methods log "
            "and close, made of a MonitoredRun (docs/use/extending.md)"
        )
    return part.__name__, part


def _tensorboard(run: MonitoredRun) -> Sink:
    from sharpen.show.monitor.tensorboard import TensorBoardSink

    return TensorBoardSink(run.run_dir / "monitor" / "tensorboard", run.resume_step, run.settings)


def _service(name: str, run: MonitoredRun) -> Sink:
    return SERVICES[name][1](importlib.import_module(name), run)


OURS: Mapping[str, tuple[str, MakeSink]] = {
    "tensorboard": ("TensorBoard", _tensorboard),
    **{name: (title, partial(_service, name)) for name, (title, _) in SERVICES.items()},
}
"""Our own monitors (`config.public.MONITORS`), by name: the title and what makes the sink."""
