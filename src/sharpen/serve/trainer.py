"""The trainer behind a server that learns: `sharpen run` with mode `train`, as a process of its own.

In: the arguments of the command. Out: whether it runs; its output, in a file. It ends with the server, after the step
that it is training, however the server ends: its standard input is a lifeline, which is closed when the server is gone.
It goes on from its checkpoint when the server starts again.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sharpen.errors import ConfigError
from sharpen.machine import filling_gaps
from sharpen.run.lock import locked

END_S = 600.0
"""How long the trainer may take to end its step and to write its checkpoint."""

LOOK_S = 0.2
"""How often the server looks whether an earlier trainer has ended."""


class TrainerProcess:
    """A trainer that was started here."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self.log = process, log

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Ask it to end after its step, and wait; kill it if it takes too long, or at Ctrl-C."""
        try:
            if self.running:
                self._process.send_signal(signal.SIGTERM)
            self._process.wait(END_S)
        finally:
            if self.running:
                self._process.kill()
                self._process.wait()


@contextlib.contextmanager
def start_trainer(
    arguments: Sequence[str], run_dir: Path, log: Path, say: Callable[[str], None]
) -> Iterator[TrainerProcess]:
    """Start `sharpen run` with these arguments for the time of a block, once no other trainer has the run."""
    _await_lock(run_dir, say)
    command = [sys.executable, "-m", "sharpen.serve.trainer", "run", *arguments]
    with log.open("ab") as output:  # of its own session: Ctrl-C in the terminal is for the server alone
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=filling_gaps(os.environ),
        )
    trainer = TrainerProcess(process, log)
    try:
        yield trainer
    finally:
        trainer.end()
        assert process.stdin is not None
        process.stdin.close()


def _await_lock(run_dir: Path, say: Callable[[str], None]) -> None:
    """Wait for the trainer of a server that was killed, which still ends its step. Raises `ConfigError` if another one
    keeps the run."""
    until, said = time.monotonic() + END_S, False
    while True:
        try:
            with locked(run_dir):
                return
        except ConfigError as error:
            if time.monotonic() > until:
                raise
            if not said:
                say(f"waiting for the trainer of before: {error}")
            said = True
            time.sleep(LOOK_S)


def _end_with_the_server() -> None:
    """Ask this process to end once its standard input is closed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_server, name="sharpen-lifeline", daemon=True).start()
    runpy.run_module("sharpen.cli.main", run_name="__main__")
