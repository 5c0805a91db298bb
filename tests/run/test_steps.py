"""The one rule of checkpoints: whatever ends a run, on disk are the weights of a whole step that is recorded."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from sharpen.errors import CheckpointError, ConfigError, JournalError, SamplingError
from sharpen.learning.trainer.checkpoint import point, pointed, write_directory
from sharpen.run.steps import Checkpoints, StepPosition


class Trainer:
    """Its weights are its version. `kept` is what it can go back to."""

    def __init__(self) -> None:
        self.version = 0
        self.kept: int | None = None
        self.saved: list[int] = []
        self.failure: BaseException | None = None

    def back_to(self, version: int) -> bool:
        if self.failure is not None:
            raise self.failure
        if self.kept == version:
            self.version = version
        return self.version == version

    def save(self, directory, position):
        if position.get("interrupted"):
            os.kill(os.getpid(), signal.SIGINT)
        if position.get("full"):
            raise CheckpointError("no space left")
        write_directory(directory, lambda partial: (partial / "weights").write_text(str(self.version)))
        self.saved.append(self.version)


class Journal:
    failure: Exception | None = None
    last_step = 0

    def flush(self) -> None:
        if self.failure is not None:
            raise self.failure

    def has_step(self, step: int) -> bool:
        return step <= self.last_step


class Run:
    """Two updates a step."""

    def __init__(self, folder: Path) -> None:
        self.trainer, self.journal, self.folder = Trainer(), Journal(), folder
        self.lines: list[str] = []
        self.checkpoints = Checkpoints(self.trainer, self.journal, folder, keep=9, say=self.lines.append)
        self.step, self.best, self.position = 0, None, {}

    def recorded(self) -> StepPosition:
        return StepPosition(step=self.step, version=2 * self.step, best_step=self.best, position=self.position)

    def train(self) -> None:
        self.trainer.version += 2
        self.step += 1

    def ends_with(self, error: BaseException, updates: int = 0, **position) -> None:
        with pytest.raises(type(error)):
            self._end(error, updates, position)

    def _end(self, error: BaseException, updates: int, position: dict) -> None:
        with self.checkpoints.saved_on_failure(self.recorded):
            self.trainer.version += updates
            self.position = position or self.position
            raise error

    @property
    def on_disk(self) -> tuple[str, str] | None:
        latest = pointed(self.folder, "latest")
        return None if latest is None else (latest.name, (latest / "weights").read_text())


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


ERRORS = [
    ConfigError("a"), SamplingError("b"), ValueError("c"), MemoryError(), KeyboardInterrupt(), SystemExit(3),
    type("OfTheUser", (BaseException,), {})(),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_ends_a_run_saves_its_last_whole_step(run, error):
    """Red when `saved_on_failure` (steps.py) has a list of what it catches."""
    for _ in range(4):
        run.train()
    run.ends_with(error)
    assert run.on_disk == ("global_step_4", "8")
    line = "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed ({type(error).__name__}"
    assert run.lines[0].startswith(line)
    assert run.lines[0].endswith("; saving a checkpoint of step 4, the last whole one")


class Untold(Exception):
    """An error of a user's that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_cannot_be_told_and_a_display_that_fails_are_no_reason_not_to_save(run):
    """Red when the line about it is made first, and an error there ends the saving."""
    run.train()
    run.ends_with(Untold())
    assert run.on_disk == ("global_step_1", "2")
    assert run.lines[0].startswith("failed (Untold); saving")
    run.train()

    def fail(_: str) -> None:
        raise ValueError("the display")

    run.checkpoints._display = fail
    run.ends_with(ValueError("x"))
    assert run.on_disk == ("global_step_2", "4")


@pytest.mark.parametrize("updates", [1, 2])
def test_half_a_step_and_one_that_is_not_recorded_are_undone_or_not_saved(run, updates):
    """Red when `_save_last` does not ask whether the weights are whole."""
    run.train()
    run.trainer.kept = 2
    run.ends_with(ValueError("x"), updates)
    assert run.on_disk == ("global_step_1", "2")
    run.train()
    run.trainer.kept = None
    run.ends_with(ValueError("x"), updates)
    assert run.on_disk == ("global_step_1", "2")
    assert run.lines[-1] == (
        "failed (ValueError: x); step 3 is not complete and is dropped, the last checkpoint stays: global_step_1"
    )


def test_a_trainer_that_cannot_say_is_not_saved(run):
    run.train()
    run.trainer.failure = KeyboardInterrupt()  # as ranks that were left in the midst of a call raise
    run.ends_with(ValueError("x"))
    assert run.on_disk is None
    assert run.lines[-1].endswith("there is no checkpoint yet")


def test_a_checkpoint_that_is_there_is_not_written_again(run):
    run.train()
    run.checkpoints.save(run.recorded())
    run.ends_with(ValueError("x"))
    assert run.trainer.saved == [2]
    assert run.lines == ["failed (ValueError: x); step 1, the last whole one, is already saved"]
    going_on = Run(run.folder)
    going_on.train()
    going_on.ends_with(ValueError("y"))
    assert going_on.trainer.saved == []
    going_on.position = {"evaluated": 0.5}
    going_on.ends_with(ValueError("z"))
    assert going_on.trainer.saved == []  # what a session begins with is on disk
    going_on.ends_with(ValueError("z"), evaluated=0.7)
    assert going_on.trainer.saved == [2]


def test_what_cannot_be_written_is_not_tried_twice_and_does_not_hide_the_error(run):
    """A failed save is not tried again behind it; one behind another failure is a note of that."""
    run.train()
    run.checkpoints.save(run.recorded())
    run.train()
    run.position = {"full": True}
    with pytest.raises(CheckpointError), run.checkpoints.saved_on_failure(run.recorded):
        run.checkpoints.save(run.recorded())
    assert run.lines == ["failed (CheckpointError: no space left); the last checkpoint stays: global_step_1"]
    run.train()
    error = ValueError("the cause")
    run.ends_with(error)
    assert error.__notes__ == ["The checkpoint of step 3 could not be written: CheckpointError: no space left"]
    run.position = {}
    run.journal.failure = JournalError("disk full")
    run.ends_with(error)
    assert run.on_disk == ("global_step_1", "2")
    assert run.lines[-1].startswith("the checkpoint of step 3 could not be written (JournalError: disk full); the last")


def test_a_journal_that_fails_behind_a_step_does_not_cost_it(run):
    """Its records are there, those of later rollouts are not. Red when any failed write means that nothing is saved."""
    run.train()
    run.journal.failure, run.journal.last_step = JournalError("locked"), 1
    run.ends_with(run.journal.failure)
    assert run.on_disk == ("global_step_1", "2")
    run.train()
    run.ends_with(run.journal.failure)
    assert run.on_disk == ("global_step_1", "2"), "step 2 is not recorded"
    run.journal.last_step = 2
    with pytest.raises(JournalError), run.checkpoints.saved_on_failure(run.recorded):
        run.checkpoints.save(run.recorded())
    assert run.on_disk == ("global_step_2", "4")
    assert run.lines[-1] == "failed (JournalError: locked); step 2, the last whole one, is already saved"


def test_ctrl_c_while_a_failed_run_saves_waits_for_it(run):
    """The error that ended the run goes up all the same. Red with `again` left out of `saved_on_failure`."""
    run.train()
    run.position = {"interrupted": True}
    run.ends_with(ValueError("x"))
    assert run.on_disk == ("global_step_1", "2")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_a_step_is_saved_waits_for_it_and_it_is_saved_once(run):
    run.train()
    run.position = {"interrupted": True}
    with pytest.raises(KeyboardInterrupt), run.checkpoints.saved_on_failure(run.recorded):
        run.checkpoints.save(run.recorded())
    assert run.trainer.saved == [2]
    assert run.lines == ["interrupted; step 1, the last whole one, is already saved"]


def test_best_is_what_the_checkpoint_says_even_if_a_kill_came_between_the_pointers(run):
    """Red when `saved_on_failure` does not look at `best` where a run goes on."""
    run.train()
    run.best = 1
    run.checkpoints.save(run.recorded())
    run.train()
    run.best = 2
    run.checkpoints.save(run.recorded())
    point(run.folder, "best", run.folder / "global_step_1")
    with suppress(ValueError), run.checkpoints.saved_on_failure(run.recorded):
        raise ValueError
    assert pointed(run.folder, "best") == run.folder / "global_step_2"
