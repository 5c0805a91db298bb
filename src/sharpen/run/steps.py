"""What the loop does around its steps: keep time, save checkpoints.

In: a trainer, the run directory, how far the run is. Out: checkpoints. What is in one is always the weights of a whole
step that is recorded in `run.db`, whatever ends the run and wherever it does.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sharpen.interrupts import deferred_interrupt
from sharpen.trainer.checkpoint import point, pointed, prune, step_directory


class Saves(Protocol):
    """The side of a trainer that is seen here."""

    @property
    def version(self) -> int:
        """The updates that its weights have had."""

    def back_to(self, version: int) -> bool:
        """Have the weights of this version, whole; False if they are not to be had."""

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint with this position."""


class Flushes(Protocol):
    """The side of a journal that is seen here."""

    def flush(self) -> None:
        """Return once everything that was recorded is on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPosition:
    """How far a run is that has recorded `step`, which led to a policy `version`; `best_step` has evaluated best of
    all; `position` is what a resumed run needs to know (JSON)."""

    step: int
    version: int
    best_step: int | None
    position: Mapping[str, Any]


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


class Checkpoints:
    """Writes the checkpoints of a run into its directory; `keep` of them stay beside the best and the latest."""

    def __init__(
        self, trainer: Saves, journal: Flushes, run_dir: Path, *, keep: int, say: Callable[[str], None]
    ) -> None:
        self._trainer = trainer
        self._journal = journal
        self._run_dir = run_dir
        self._keep = keep
        self._say = say
        self._tried: str | None = None
        self._written: str | None = None

    def save(self, recorded: StepPosition) -> None:
        """Write the checkpoint of a step, make it `latest`, and let `best` be what it says. Raises `CheckpointError` or
        `JournalError`; then the last one stays."""
        assert recorded.version == self._trainer.version, "the weights are those of the recorded step"
        target, content = step_directory(self._run_dir, recorded.step), _text(recorded)
        with deferred_interrupt():
            self._tried = content
            self._journal.flush()  # a run that goes on from here reads what has trained
            self._trainer.save(target, recorded.position)
            point(self._run_dir, "latest", target)
            self._point_to_best(recorded)
            self._written = content
            prune(self._run_dir, self._keep)

    @contextlib.contextmanager
    def saved_on_failure(self, recorded: Callable[[], StepPosition]) -> Iterator[None]:
        """Whatever ends this block, Ctrl-C or any error: save the last step that `recorded` tells of, if its weights
        are to be had and are not on disk yet; else leave the last checkpoint as it is. Then it goes on up."""
        before = recorded()
        if pointed(self._run_dir, "latest") == step_directory(self._run_dir, before.step):  # the run goes on from there
            self._written = _text(before)
            self._point_to_best(before)  # a kill may have come between the two pointers
        try:
            yield
        except BaseException as error:
            with deferred_interrupt(again=False):
                self._save_last(recorded(), error)
            raise

    def _save_last(self, recorded: StepPosition, error: BaseException) -> None:
        """The second Ctrl-C within ends it, as it ends a save at any other time."""
        what, content = _what(error), _text(recorded)
        if content == self._written:
            self._say(f"{what}; the checkpoint of step {recorded.step}, the last whole one, is there")
            return
        if content == self._tried:  # writing it is what has failed
            self._say(f"{what}; {self._left()}")
            return
        if not self._is_whole(recorded.version):
            self._say(f"{what}; step {recorded.step + 1} is given up in the midst, {self._left()}")
            return
        self._say(f"{what}; saving a checkpoint of step {recorded.step}, the last whole one")
        try:
            self.save(recorded)
        except BaseException as second:
            if content == self._written:  # a further Ctrl-C, which the save had held back
                return
            error.add_note(f"No checkpoint of step {recorded.step} was written either: {_line(second)}")
            self._say(f"no checkpoint of step {recorded.step} was written ({_line(second)}); {self._left()}")

    def _point_to_best(self, recorded: StepPosition) -> None:
        if recorded.best_step is None:
            return
        best = step_directory(self._run_dir, recorded.best_step)
        if best.is_dir() and pointed(self._run_dir, "best") != best:
            point(self._run_dir, "best", best)

    def _is_whole(self, version: int) -> bool:
        """Whoever cannot say so has not got the weights: ranks that were lost, a GPU that answers no more."""
        try:
            return self._trainer.back_to(version)
        except BaseException:
            return False

    def _left(self) -> str:
        latest = pointed(self._run_dir, "latest")
        return "there is no checkpoint yet" if latest is None else f"the last checkpoint stays: {latest.name}"


def _text(recorded: StepPosition) -> str:
    return json.dumps([recorded.step, recorded.version, recorded.position], sort_keys=True, default=repr)


def _what(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed ({_line(error)})"


def _line(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
