"""Processes that tests start, wait for and end.

In: arguments of Python. Out: the process, which does not outlive the test; whether processes of any kind still run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def python(*arguments: str, paths: Iterable[Path] = (), **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Python with these arguments, which imports what this process can and from `paths`; output and errors in pipes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, text=True, **{"env": environment, **pipes, **options}) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line of its output; the test fails with its errors if it has none."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else "no line"
    return line.rstrip("\n")


def wait_for(reached: Callable[[], Any], process: subprocess.Popen[str], *, within_s: float = 400.0) -> None:
    """Until it is so; the test fails if the process ends before."""
    deadline = time.monotonic() + within_s
    while not reached():
        assert process.poll() is None, f"ended with {process.returncode}: {process.communicate()}"
        assert time.monotonic() < deadline, f"not so after {within_s:g} s"
        time.sleep(0.05)


def alive(process_id: int) -> bool:
    """Whether it runs; one that ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ends(process_id: int, within_s: float = 120.0) -> bool:
    """Whether it has ended by then."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and alive(process_id):
        time.sleep(0.05)
    return not alive(process_id)
