"""The time limit and the checkpoints of the loop.

In: a trainer, the run directory, how far the run is. Out: checkpoints. However a run ends, a checkpoint always holds
the weights of a whole step that is recorded in `run.db`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sharpen.errors import JournalError
from sharpen.interrupts import deferred_interrupt
from sharpen.learning.trainer.checkpoint import point, pointed, prune, step_directory


class Saves(Protocol):
    """The part of a trainer that is used here."""

    @property
    def version(self) -> int:
        """The number of updates of its weights."""

    def back_to(self, version: int) -> bool:
        """Return to the whole weights of this version; False if they are not available."""

    def save(self, directory: Path, position: Mapping[str, Any]) -> None:
        """Write a checkpoint with this position."""


class Flushes(Protocol):
    """The part of a journal that is used here."""

    def flush(self) -> None:
        """Return once all records are on disk. Raises `JournalError` if one could not be written."""

    def has_step(self, step: int) -> bool:
        """Whether the records of this step are on disk, if not those of later work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPosition:
    """The last recorded step: the policy `version` after it, the `best_step` so far, and the `position` that a resumed
    run needs (JSON)."""

    step: int
    version: int
    best_step: int | None
    position: Mapping[str, Any]


class TimeLimit:
    """The wall-clock limit of a session, in seconds from now; None is no limit. `say` receives a line when the limit is
    reached."""

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
    """Writes the checkpoints of a run into its directory; keeps the best, the latest and `keep` more."""

    def __init__(
        self, trainer: Saves, journal: Flushes, run_dir: Path, *, keep: int, say: Callable[[str], None]
    ) -> None:
        self._trainer = trainer
        self._journal = journal
        self._run_dir = run_dir
        self._keep = keep
        self._display = say
        self._tried: str | None = None
        self._written: str | None = None

    def save(self, recorded: StepPosition) -> None:
        """Write the checkpoint of a step and update `latest` and `best`. Raises `CheckpointError`, and then leaves the
        last checkpoint in place; and `JournalError`, after it has written the checkpoint if the step is recorded."""
        assert recorded.version == self._trainer.version, "the trainer has the weights of the recorded step"
        target, content = step_directory(self._run_dir, recorded.step), _content(recorded)
        with deferred_interrupt():
            self._tried = content
            failure = self._flush(recorded.step)  # a run that continues from here reads the trained steps
            self._trainer.save(target, recorded.position)
            point(self._run_dir, "latest", target)
            self._point_to_best(recorded)
            self._written = content
            prune(self._run_dir, self._keep)
            if failure is not None:
                raise failure

    def _flush(self, step: int) -> JournalError | None:
        """Have the records of a step on disk. Return the failure of later records, if any; raises its own."""
        try:
            self._journal.flush()
        except JournalError as error:
            if not self._journal.has_step(step):
                raise
            return error
        return None

    @contextlib.contextmanager
    def saved_on_failure(self, recorded: Callable[[], StepPosition]) -> Iterator[None]:
        """If Ctrl-C or any error ends the block, save the last step that `recorded` returns, unless its weights are on
        disk or are no longer available. The error then propagates."""
        before = recorded()
        if pointed(self._run_dir, "latest") == step_directory(self._run_dir, before.step):  # the run continues from it
            self._written = _content(before)
            self._point_to_best(before)  # a kill may have come between the two links
        try:
            yield
        except BaseException as error:
            with deferred_interrupt(again=False):
                self._save_last(recorded(), error)
            raise

    def _save_last(self, recorded: StepPosition, error: BaseException) -> None:
        """Save the last whole step after `error`, and say so. A second Ctrl-C in here ends it, as it ends any save."""
        cause, content = _cause(error), _content(recorded)
        if content == self._written:
            self._say(f"{cause}; step {recorded.step}, the last whole one, is already saved")
            return
        if content == self._tried:  # saving this step is cause failed
            self._say(f"{cause}; {self._last_checkpoint()}")
            return
        if not self._restore(recorded.version):
            self._say(f"{cause}; step {recorded.step + 1} is not complete and is dropped, {self._last_checkpoint()}")
            return
        self._say(f"{cause}; saving a checkpoint of step {recorded.step}, the last whole one")
        try:
            self.save(recorded)
        except BaseException as second:
            if content == self._written:  # another Ctrl-C, deferred by the save
                return
            reason = _first_line(second)
            with contextlib.suppress(TypeError):  # notes that are no list
                error.add_note(f"The checkpoint of step {recorded.step} could not be written: {reason}")
            self._say(
                f"the checkpoint of step {recorded.step} could not be written ({reason}); {self._last_checkpoint()}"
            )

    def _say(self, line: str) -> None:
        """Show a line. That it cannot be shown is no reason not to save."""
        with contextlib.suppress(Exception):
            self._display(line)

    def _point_to_best(self, recorded: StepPosition) -> None:
        if recorded.best_step is None:
            return
        best = step_directory(self._run_dir, recorded.best_step)
        if best.is_dir() and pointed(self._run_dir, "best") != best:
            point(self._run_dir, "best", best)

    def _restore(self, version: int) -> bool:
        """Whether the trainer can return to this version. Any error means no: ranks were lost, or the GPU fails."""
        try:
            return self._trainer.back_to(version)
        except BaseException:
            return False

    def _last_checkpoint(self) -> str:
        latest = pointed(self._run_dir, "latest")
        return "there is no checkpoint yet" if latest is None else f"the last checkpoint stays: {latest.name}"


def _content(recorded: StepPosition) -> str:
    return json.dumps([recorded.step, recorded.version, recorded.position], sort_keys=True, default=repr)


def _cause(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    """Return the class and the first line of an error, whose text may be impossible to make."""
    try:
        lines = str(error).strip().splitlines()
    except BaseException:
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
