"""Places at which a run is killed: between two writes that belong together, amid a write, while weights move.

In: lines of the source by how they begin. Out: a process that ends itself with SIGKILL where one is reached.
"""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import sharpen

ROOT = Path(sharpen.__file__).parent


class Aim(NamedTuple):
    """A line of a file, before which the process ends, when it is reached for the so-many-th time."""

    file: str
    line: str
    time: int = 1

    def numbers(self) -> frozenset[int]:
        """The numbers of the lines that begin so."""
        lines = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        return frozenset(number for number, line in enumerate(lines, 1) if line.strip().startswith(self.line))


AIMS: Mapping[str, tuple[Aim, ...]] = {
    "checkpoint": (
        Aim("learning/trainer/checkpoint.py", 'save_file(_on_cpu(part), inner / f"{name}'),
        Aim("learning/trainer/checkpoint.py", "write_checksums(partial)"),
        Aim("learning/trainer/checkpoint.py", "for path in (*partial.rglob"),
    ),
    "rename and pointer": (
        Aim("learning/trainer/checkpoint.py", "partial.rename(directory)"),
        Aim("learning/trainer/checkpoint.py", "_remove(replaced, ignore_errors=True)"),
        Aim("learning/trainer/checkpoint.py", "partial.replace(root / name)"),
        Aim("run/steps.py", "self._point_to_best(recorded)"),
        Aim("learning/trainer/checkpoint.py", "_remove(removed)"),
    ),
    "commit": (
        Aim("learning/experience/journal.py", "item.write(self._connection)"),
        Aim("learning/experience/journal.py", 'self._connection.execute("COMMIT")'),
        Aim("run/loop.py", "self.progress = progress"),
    ),
    "weights": (
        Aim("learning/trainer/trainer.py", "self.version += 1"),
        Aim("engine/embedded/engine.py", "self._scheduler.suspend_all()"),
        Aim("engine/embedded/engine.py", "self._stepper.versions_A[BASE] = version"),
    ),
    "monitor": (
        Aim("show/monitor/metrics.py", "self._file.flush()"),
        Aim("show/monitor/tensorboard.py", "written = self._file.write(data)"),
        Aim("show/monitor/tensorboard.py", "self._num_bytes += written"),
    ),
}
"""By kind."""


class Trap:
    """Ends this process at an aim, in whichever thread."""

    def __init__(self, aim: Aim) -> None:
        self._file, self._numbers, self._left = str(ROOT / aim.file), aim.numbers(), aim.time

    def set(self) -> None:
        """From now on."""
        threading.settrace(self)
        sys.settrace(self)

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        if event == "line" and frame.f_lineno in self._numbers:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self
