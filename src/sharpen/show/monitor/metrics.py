"""Write the metrics of a run: always to `metrics.jsonl`, and to TensorBoard, a service, or a monitor of somebody's own.

In: a step and its numbers, named `reward/mean`, `loss/...`, `time/...`, `tokens/...`, `eval/...`. Out: the files of the
run directory. A run resumed at step N first removes what it had written about later steps. Failures of the sink other
than `metrics.jsonl` never end or hold a run (`TolerantSink`).

Writes to a sink wait in a queue, beside the run. What it refuses is tried again, with what comes next or after a while,
and at the end; what it missed then is counted.

    log, sample, rollouts ─► queue ─► [its thread: open, write, close] ─► sink
      └─ waits a moment for the queue: a sink that answers has each step when the call returns
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from sharpen.config.doors import find_part
from sharpen.config.extras import install_command
from sharpen.config.secrets import hide
from sharpen.contracts import MonitoredRun, Rows, Sink, TakesRollouts, TakesSamples
from sharpen.errors import ConfigError, JournalError
from sharpen.files import write_whole
from sharpen.show.monitor.services import SERVICES

PATIENCE_S = 2.0
"""How long a call waits for a sink that answers; one that did not is not waited for until it has caught up."""
RETRY_S = 30.0
"""How soon a refused write is tried again, if nothing new is written before."""
MAX_TRIES = 5
"""Tries of one write, after which the next ones have their turn. Opening is tried whenever there is something new."""
MAX_WAITING = 1000
"""Writes that wait; the oldest are left out."""
CLOSE_S = 60.0
"""How long the end of a run waits for what the sink has not taken."""


@dataclass(slots=True, eq=False)
class _Write:
    """A write that waits: what the sink is to do, in words and as a function. `tries` have failed."""

    what: str
    write: Callable[[Sink], None]
    tries: int = 0


class TolerantSink:
    """A sink whose failures do not stop the run: a service may be down, a disk full. `open_` opens it, and `say` is
    called with a message at the first failure, on the caller's thread.

    Of the `asked` writes it `missed` some for good; `refused` tries failed.
    """

    def __init__(
        self,
        name: str,
        open_: Callable[[], Sink],
        say: Callable[[str], None],
        *,
        patience_s: float = PATIENCE_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._name, self._open, self._say = name, open_, say
        self._patience_s, self._close_s = patience_s, close_s
        self._sink: Sink | None = None
        self.asked = self.refused = self.missed = 0
        self._news: str | None = None
        self._changed = threading.Condition()
        self._waiting: deque[_Write] = deque()
        self._fresh = self._closing = self._idle = self._late = False
        threading.Thread(target=self._work, name="sharpen-monitor", daemon=True).start()
        self._put(_Write("be opened", lambda sink: None))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        numbers = dict(metrics)
        self._put(_Write(f"take the numbers of step {step}", lambda sink: sink.log(step, numbers)))

    def sample(self, step: int, text: str) -> None:
        """Show a text of a step, if the sink takes some."""

        def write(sink: Sink) -> None:
            if isinstance(sink, TakesSamples):
                sink.sample(step, text)

        self._put(_Write(f"take the sample of step {step}", write))

    def rollouts(self, step: int, rows: Rows) -> None:
        """Show rollouts of a step, if the sink takes tables."""

        def write(sink: Sink) -> None:
            if isinstance(sink, TakesRollouts):
                sink.rollouts(step, rows)

        self._put(_Write(f"take the rollouts of step {step}", write))

    def close(self) -> None:
        """Write what waits, and finish. What takes too long is given up."""
        self._put(_Write("be closed", lambda sink: sink.close()), self._close_s, last=True)
        with self._changed:
            self.missed += len(self._waiting)
            self._waiting.clear()

    @property
    def line(self) -> str:
        """What it refused over the run, as text; empty if nothing."""
        if self.missed:
            return f"{self._name} missed {self.missed} of {self.asked} writes: metrics.jsonl has every number"
        if self.refused:
            return f"{self._name} refused {self.refused} writes at first, and took them later"
        return ""

    def _put(self, write: _Write, patience_s: float | None = None, *, last: bool = False) -> None:
        """Let a write wait its turn, and wait for it a moment. After the `last` the thread ends."""
        with self._changed:
            self._closing = self._closing or last
            self.asked += 1
            self._waiting.append(write)
            if len(self._waiting) > MAX_WAITING:
                del self._waiting[1]  # the first may be in work
                self.missed += 1
            self._fresh, self._idle = True, False
            self._changed.notify_all()
            if patience_s is not None or not self._late:
                self._late = not self._changed.wait_for(lambda: self._idle, patience_s or self._patience_s)
            news, self._news = self._news, None
        if news is not None:
            self._say(news)

    def _work(self) -> None:
        """Write what waits, in its order, until the sink is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fresh, RETRY_S if self._waiting else None)
                self._fresh = False
            self._write_all()
            with self._changed:
                self._idle, self._late = not self._fresh, False
                self._changed.notify_all()
                if self._closing and not self._fresh:
                    return

    def _write_all(self) -> None:
        """Write until the sink refuses, or at the end of the run until each has been tried once more."""
        while self._waiting:
            write = self._waiting[0]
            accepted = self._try(write)
            with self._changed:
                last = self._closing or (write.tries >= MAX_TRIES and self._sink is not None)
                if self._closing and self._sink is None:  # it is not there: nothing else is asked of it
                    self.missed += len(self._waiting)
                    self._waiting.clear()
                    return
                if not accepted and not last:
                    return
                if self._waiting and self._waiting[0] is write:
                    self._waiting.popleft()
                    self.missed += not accepted

    def _try(self, write: _Write) -> bool:
        """Try a write; note the first failure."""
        try:
            if self._sink is None:
                self._sink = self._open()
            write.write(self._sink)
        except BaseException as error:  # the boundary to a package and a service that are not ours, in their thread
            write.tries += 1
            reason = hide((str(error).strip() or type(error).__name__).splitlines()[0])
            with self._changed:
                self.refused += 1
                if self.refused == 1:
                    what = "be opened" if self._sink is None else write.what
                    self._news = (
                        f"  ! {self._name} could not {what} ({type(error).__name__}: {reason}): the run continues, "
                        "metrics.jsonl has every number; it is tried again, and what is missing at the end is counted"
                    )
            return False
        return True


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
