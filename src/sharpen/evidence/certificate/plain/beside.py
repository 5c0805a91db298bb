"""Repeat a step's updates beside the run that goes on: in a process of its own, at the lowest priority.

In: the run directory, a step, and the folders of the trainer's state before and after it. Out: a `Retrained`. The
process takes what the run leaves idle; it ends with the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

from sharpen.evidence.certificate.certificate import Retrained
from sharpen.machine import num_cores, python_path

_LOWEST = 19
"""The niceness of the process."""


class RepeatedBeside:
    """A step that is made once more, from its start in `__init__` on."""

    def __init__(self, run_dir: Path, step: int, before: Path | None, after: Path) -> None:
        self.step = step
        self._began = time.perf_counter()
        self._output = self._last_words = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process has ended)
        self._seconds = 0.0
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sharpen.evidence.certificate.plain.beside",
                *map(str, (run_dir, step, after, before or "")),
            ],
            stdin=subprocess.PIPE,  # the process ends when this closes
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **_environment()},
            start_new_session=True,  # Ctrl-C in the terminal is for the run alone
        )
        self._reader = threading.Thread(target=self._read, name=f"sharpen-repeat-{step}", daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        """Whether there is a result."""
        return not self._reader.is_alive()

    @property
    def seconds(self) -> float:
        """How long it has taken, or takes."""
        return self._seconds if self.ended else time.perf_counter() - self._began

    def wait(self, seconds: float) -> bool:
        """Wait so long for the end, and return whether it has come."""
        self._reader.join(seconds)
        return self.ended

    def result(self) -> Retrained:
        """Return what was found, once it has ended; a process that failed has repeated nothing, and its last words say
        why."""
        assert self.ended
        if self._process.returncode == 0:
            return Retrained.from_json(json.loads(self._output))
        code = self._process.returncode
        ended = "it was killed, as where memory is short" if code == -signal.SIGKILL else f"exit code {code}"
        words = self._last_words.decode(errors="replace").strip().splitlines() or [ended]
        return Retrained(not_repeated=(f"the updates of steps {self.step}: the process for it failed ({words[-1]})",))

    def close(self) -> None:
        """End it now, if it has not ended."""
        self._process.kill()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process, self._errors:
            self._output = self._process.stdout.read()
            self._process.wait()
            self._errors.seek(0)
            self._last_words = self._errors.read()
        self._seconds = time.perf_counter() - self._began


def num_threads() -> int:
    """Return how many threads it computes with: half of the cores, at least one."""
    return max(1, num_cores() // 2)


def _environment() -> dict[str, str]:
    """The variables of the process: its threads, no GPU, and the package that this process imports."""
    return {"OMP_NUM_THREADS": str(num_threads()), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}


def _end_with_the_run() -> None:
    """End this process once its standard input is closed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _main(run_dir: str, step: str, after: str, before: str) -> None:
    os.nice(_LOWEST)
    threading.Thread(target=_end_with_the_run, name="sharpen-lifeline", daemon=True).start()
    from sharpen.evidence.certificate.plain.retrain import retrain_step

    print(json.dumps(asdict(retrain_step(Path(run_dir), int(step), Path(before) if before else None, Path(after)))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
