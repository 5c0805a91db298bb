"""The trainer behind a server that learns: `sharpen run` with mode `train`, as a process of its own.

In: the arguments of the command. Out: whether it runs; its output, in a file. It ends with the server, after the step
that it is training, and goes on from its checkpoint when the server starts again.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

END_S = 600.0
"""How long the trainer may take to end its step and to write its checkpoint."""


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
def start_trainer(arguments: Sequence[str], log: Path) -> Iterator[TrainerProcess]:
    """Start `sharpen run` with these arguments for the time of a block."""
    command = [sys.executable, "-m", "sharpen.cli.main", "run", *arguments]
    with log.open("ab") as output:  # of its own session: Ctrl-C in the terminal is for the server alone
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    trainer = TrainerProcess(process, log)
    try:
        yield trainer
    finally:
        trainer.end()
