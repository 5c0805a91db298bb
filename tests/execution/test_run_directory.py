"""A run's directory: found again, put right after a kill, never begun anew over what was trained."""

import json
import os
from pathlib import Path

import pytest

from agenttune.config.load import Resolved, resolve
from agenttune.errors import CheckpointError, ConfigError
from agenttune.execution.run_directory import RunDirectory, open_run_directory
from agenttune.experience.journal import Journal
from agenttune.trainer.checkpoint import STATE, is_whole, point, pointed, repair, step_directory, write_directory


def settings(root: Path, **changed: object) -> Resolved:
    given = {
        "checkpoint_root_dir": str(root),
        "name": "one",
        "train_dataset": {"path": "tasks.jsonl"},
        "model": {"model_path": "toy", "max_model_len": 64},
        **changed,
    }
    return resolve(None, given)


def checkpoint(root: Path, step: int, content: str = "") -> Path:
    """A checkpoint with everything that one has, in small."""

    def write(partial: Path) -> None:
        (partial / STATE).mkdir()
        for name in ("config.json", f"{STATE}/state.json"):
            (partial / name).write_text("{}")
        for name in ("model", f"{STATE}/optimizer", f"{STATE}/random"):
            (partial / f"{name}.safetensors").write_text(content)

    target = step_directory(root, step)
    write_directory(target, write)
    return target


def run_directory(root: Path, *steps: int) -> Path:
    """That of the run `one`, which has trained so many steps; the last is `latest`."""
    path = root / "AgentTune" / "one"
    path.mkdir(parents=True)
    for step in steps:
        point(path, "latest", checkpoint(path, step))
    lines = [json.dumps({"step": step, "reward/mean": 0.5}) for step in range(max(steps, default=0) + 1)]
    (path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    return path


def opened(resolved: Resolved) -> RunDirectory:
    with open_run_directory(resolved, None) as directory:
        return directory


def kill_in_replacement(path: Path, step: int) -> None:
    """Write a checkpoint again in a process of its own, which is gone between the two renames."""
    target = step_directory(path, step)

    class Dies(type(target)):  # type: ignore[misc]
        def rename(self, new):
            if not Path(new).name.endswith(".replaced"):
                os._exit(9)
            return super().rename(new)

    if (child := os.fork()) == 0:
        write_directory(Dies(target), lambda partial: None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not target.exists()


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path):
    """Red without `repair`: `latest` points to nothing, and the run began anew over its own records."""
    path = run_directory(tmp_path, 2, 4)
    kill_in_replacement(path, 4)
    assert pointed(path, "latest") is None
    directory = opened(settings(tmp_path))
    assert directory.checkpoint == step_directory(path, 4)
    assert is_whole(directory.checkpoint)
    assert directory.notes == ("global_step_4 was being replaced when the run was killed: it is back as it was before",)
    assert not list(path.glob(".global_step_*"))
    assert opened(settings(tmp_path)).notes == ()


def test_an_interrupt_between_the_two_renames_leaves_nothing_behind(tmp_path: Path):
    """A second Ctrl-C there. Red when only failures of the disk are cleaned up behind."""
    path = run_directory(tmp_path, 2)

    class Interrupted(type(path)):  # type: ignore[misc]
        def rename(self, new):
            if self.name.endswith(".partial"):
                raise KeyboardInterrupt
            return super().rename(new)

    with pytest.raises(KeyboardInterrupt):
        write_directory(Interrupted(step_directory(path, 2)), lambda partial: None)
    assert is_whole(step_directory(path, 2))
    assert not list(path.glob(".global_step_*"))


def test_what_a_kill_behind_the_renames_left_goes(tmp_path: Path):
    path = run_directory(tmp_path, 4)
    checkpoint(path, 4, "old").rename(path / ".global_step_4.replaced")
    checkpoint(path, 4, "new")
    (path / ".global_step_6.partial").mkdir()
    (path / ".global_step_2.removed").mkdir()
    assert repair(path) == []
    assert (path / "global_step_4" / "model.safetensors").read_text() == "new"
    assert not list(path.glob(".global_step_*"))


@pytest.mark.parametrize("how", ["missing", "dangling", "empty", "not whole"])
def test_a_broken_latest_is_put_right_from_the_newest_whole_checkpoint(how: str, tmp_path: Path):
    path = run_directory(tmp_path, 2, 4, 10)
    (path / "global_step_10" / STATE / "optimizer.safetensors").unlink()
    (path / "latest").unlink()
    if how == "dangling":
        point(path, "latest", step_directory(path, 12))
    elif how == "empty":  # without symbolic links a pointer is a file
        (path / "latest").write_text("")
    elif how == "not whole":
        point(path, "latest", step_directory(path, 10))
    directory = opened(settings(tmp_path))
    assert directory.checkpoint == step_directory(path, 4)
    (note,) = directory.notes
    assert note.endswith("it now points to global_step_4, the newest whole checkpoint")
    assert pointed(path, "latest") == step_directory(path, 4)


def test_a_best_that_points_to_nothing_goes(tmp_path: Path):
    path = run_directory(tmp_path, 2)
    point(path, "best", step_directory(path, 7))
    assert opened(settings(tmp_path)).notes == ("`best` pointed to global_step_7, which is not there: it is removed",)
    assert not os.path.lexists(path / "best")


def test_checkpoints_of_which_none_is_whole_are_refused_and_nothing_is_written(tmp_path: Path):
    path = run_directory(tmp_path, 2)
    (path / "global_step_2" / STATE / "state.json").unlink()
    before = sorted(file.name for file in path.iterdir())
    with pytest.raises(CheckpointError, match=r"`latest` points to global_step_2, which is not whole, and none"):
        opened(settings(tmp_path))
    assert sorted(file.name for file in path.iterdir()) == sorted([*before, "run.lock"])


@pytest.mark.parametrize("record", ["run.db", "metrics.jsonl"])
def test_steps_without_a_checkpoint_are_never_begun_anew_over(record: str, tmp_path: Path):
    """Red when a missing `latest` means a fresh run: the metrics of its steps were wiped without a word."""
    path = run_directory(tmp_path, 3)
    for pointer in ("latest", "global_step_3"):
        (path / pointer).rename(tmp_path / pointer)
    if record == "run.db":
        (path / "metrics.jsonl").unlink()
        with Journal(path / record) as journal:
            for step in (1, 2, 3):
                journal.add_step(step, step, {})
    before = (path / record).read_bytes()
    with pytest.raises(ConfigError, match=r"'one' has trained 3 steps and left no checkpoint .* Move or delete the"):
        opened(settings(tmp_path))
    assert (path / record).read_bytes() == before
    assert not (path / "resolved.json").exists()


def test_a_run_that_trained_no_step_is_begun_anew(tmp_path: Path):
    """A check that failed, an evaluation before: nothing to lose."""
    path = run_directory(tmp_path)
    Journal(path / "run.db").close()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert opened(settings(tmp_path)).checkpoint is None


def test_a_directory_is_held_while_it_is_open(tmp_path: Path):
    def twice() -> None:
        with open_run_directory(settings(tmp_path), None):
            opened(settings(tmp_path))

    with pytest.raises(ConfigError, match="'one' is in use"):
        twice()
    assert opened(settings(tmp_path)).checkpoint is None


def test_runs_of_the_same_second_get_names_of_their_own(tmp_path: Path):
    names = {opened(settings(tmp_path, name=None)).path.name for _ in range(4)}
    assert len(names) == 4
