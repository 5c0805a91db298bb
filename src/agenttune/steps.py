"""What both coordinators (`loop`, `supervised.loop`) do around their steps: keep time, save checkpoints, hold Ctrl-C
back.

In: a trainer, the run directory, how far the run is. Out: checkpoints that are whole.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from agenttune.trainer.checkpoint import point, prune, step_directory


class Saves(Protocol):
    """The side of a trainer that is seen here."""

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint with this position."""


class TimeLimit:
    """The wall-clock limit of a session, in seconds from now; None is no limit. `say` gets the line that tells of its
    end."""

    def __init__(self, limit_s: float | None, say: Callable[[str], None]) -> None:
        self._started = time.perf_counter()
        self._limit_s = limit_s
        self._say = say

    def is_up(self, step: int) -> bool:
        """Whether the time is up after this step."""
        if self._limit_s is None or time.perf_counter() - self._started < self._limit_s:
            return False
        self._say(f"the time limit of {self._limit_s:g} s is reached after step {step}")
        return True


@contextlib.contextmanager
def saved_on_failure(
    save: Callable[[], None], failures: tuple[type[Exception], ...], say: Callable[[str], None]
) -> Iterator[None]:
    """Save a checkpoint of the last whole step before Ctrl-C or one of these failures, which leave the weights whole,
    goes on up."""
    caught: tuple[type[BaseException], ...] = (KeyboardInterrupt, *failures)
    try:
        yield
    except caught as error:
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else "the run failed, its weights are whole"
        say(f"{what}: saving a checkpoint of the last whole step")
        save()
        raise


def save_checkpoint(
    trainer: Saves, run_dir: Path, step: int, position: Mapping[str, Any], *, best: bool, keep: int
) -> None:
    """Write the checkpoint of a step, make it `latest`, and `best` if it is; keep `keep` others."""
    target = step_directory(run_dir, step)
    with deferred_interrupt():
        trainer.save(target, position)
        point(run_dir, "latest", target)
        if best:
            point(run_dir, "best", target)
        prune(run_dir, keep)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until this block is done, so that it never leaves half an update or half a checkpoint.

    A second Ctrl-C ends at once. Outside the main thread signals do not arrive, and nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal caught
        if caught:
            raise KeyboardInterrupt
        caught = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        signal.raise_signal(signal.SIGINT)  # for whoever waits outside: another such block, too
