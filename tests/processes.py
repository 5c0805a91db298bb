"""Processes that tests start, wait for and end.

In: arguments of Python. Out: the process, which does not outlive the test; whether processes of any kind still run.

`python` starts one from nothing. `forked` spares it what importing torch and transformers takes, 2 to 4 seconds of a
core: it goes on from a process that has done so, and nothing else. What it is asked, told by signals, prints and leaves
is the same; a test of what is imported, or of how the interpreter starts and ends, takes `python`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORTED = ["torch", "transformers.modeling_layers", "datasets", "openai", "sharpen.run.assembly"]


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


class Forked:
    """A process of `forked`, used like `subprocess.Popen` with text in its pipes."""

    def __init__(self, arguments: Sequence[str], folder: Path | None, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        place = (str(folder or Path.cwd()), dict(environment), *(there for _, there in pipes))
        self._process = context.Process(target=_go_on, args=(list(arguments), *place))
        self._process.start()
        self.stdout, self.stderr = (os.fdopen(os.dup(here.fileno()), encoding="utf-8") for here, _ in pipes)
        for pair in pipes:
            for end in pair:
                end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        with ThreadPoolExecutor() as pool:
            read = pool.map(
                lambda pipe: "" if pipe.closed else pipe.read(), (self.stdout, self.stderr), timeout=timeout
            )
            try:
                output, errors = read
            except TimeoutError:
                self.kill()
                raise
        self.wait(timeout)
        return output, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def forked(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Iterator[Forked]:
    """As `python`, without its imports: `-m MODULE`, `-c CODE` or a file, and arguments."""
    process = Forked(arguments, cwd, os.environ if env is None else env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def _go_on(arguments: Sequence[str], folder: str, environment: Mapping[str, str], output: Any, errors: Any) -> None:
    """What the process does: from here on it is one that was started with these arguments, there."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, pipe in enumerate((output, errors), start=1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    kind, *given = arguments
    try:
        if kind == "-m":
            sys.argv, sys.path[:0] = given, [""]
            runpy.run_module(given[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv, sys.path[:0] = ["-c", *given[1:]], [""]
            exec(compile(given[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[:0] = list(arguments), [str(Path(kind).resolve().parent)]
            main = sys.modules["__main__"] = ModuleType("__main__")
            main.__file__ = kind
            exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)
    finally:
        atexit._run_exitfuncs()


def line_of(process: subprocess.Popen[str] | Forked) -> str:
    """The next line of its output; the test fails with its errors if it has none."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else "no line"
    return line.rstrip("\n")


def wait_for(reached: Callable[[], Any], process: subprocess.Popen[str] | Forked, *, within_s: float = 400.0) -> None:
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
