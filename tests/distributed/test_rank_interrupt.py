"""Ctrl-C: of the coordinator alone, and of a terminal, which sends it to the whole process group."""

import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from group_toys import (
    assert_same_weights,
    leftover_folders,
    make_plan,
    make_toy,
    one_process,
    processes,
    ranks_of,
)
from processes import ends, forked, wait_for
from rank_runs import assert_same_losses, interrupted_here, rows, run

from sharpen.placement.ranks.group import TrainerGroup
from sharpen.placement.ranks.processes import RankProcesses

pytestmark = pytest.mark.distributed

FIXED = {"project_name": "P", "experiment_name": "fixed"}
IN_ITS_OWN_GROUP = """
import os, runpy
os.setsid()
runpy.run_module("sharpen.cli.main", run_name="__main__", alter_sys=True)
"""


def command(undisturbed: Path, folder: Path, workflow: str, *settings: str) -> Any:
    """The same run by the command, with two ranks, in a process group of its own."""
    settings = (f"checkpoint_root_dir={folder}", "project=P", "name=fixed", "trainer.num_processes=2", *settings)
    settings = (f"workflow={Path(__file__).parent / 'rank_runs.py'}:{workflow}", *settings)
    given = [part for setting in settings for part in ("--set", setting)]
    return forked("-c", IN_ITS_OWN_GROUP, "run", "--config", str(undisturbed / "config.yaml"), *given)


@contextmanager
def interrupted_amid(ranks: RankProcesses, times: int) -> Iterator[None]:
    """Ctrl-C, so many times, while a call waits for the second rank, which is stopped and then goes on."""
    before = signal.getsignal(signal.SIGINT)
    victim = ranks.process_ids[1]
    os.kill(victim, signal.SIGSTOP)

    def interrupt() -> None:
        while (handler := signal.getsignal(signal.SIGINT)) is before:  # the call has not begun
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        while not inspect.getclosurevars(handler).nonlocals["caught"]:  # two signals at once would be one
            time.sleep(0.01)
        if times == 2:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            os.kill(victim, signal.SIGCONT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


def test_ctrl_c_waits_for_the_ranks_and_a_second_one_does_not(tmp_path):
    """The call is made whole, so that a checkpoint can be saved; twice ends the ranks (`nothing_left_behind`).

    Red when `TrainerGroup._call` does not hold Ctrl-C back."""
    toy = make_toy(tmp_path / "model")
    plan = make_plan(toy)
    one = one_process(plan)
    one.train_step(toy.batches())
    with processes(plan) as ranks:
        group = TrainerGroup(ranks)
        with interrupted_amid(ranks, 1):
            group.train_step(toy.batches())
        assert group.version == 1
        assert_same_weights(one, group)
        group.save(tmp_path / "checkpoint", {"step": 1})
        with interrupted_amid(ranks, 2):
            group.train_step(toy.batches())
        with pytest.raises(KeyboardInterrupt):
            group.save(tmp_path / "too late", {"step": 2})
    assert one.restore(tmp_path / "checkpoint") == {"step": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]


def test_an_interrupted_run_goes_on_exactly(tmp_path, toy_model_dir, toy_dataset, undisturbed):
    """The coordinator alone, in step 3: the checkpoint is of step 2, the end as if nobody had disturbed it."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, toy_model_dir, toy_dataset, 2, workflow=interrupted_here, **FIXED)
    run_dir = tmp_path / "P" / "fixed"
    assert (run_dir / "latest").resolve().name == "global_step_2"
    assert run(tmp_path, toy_model_dir, toy_dataset, 2, **FIXED).steps == 4
    assert_same_losses(undisturbed, run_dir)


@pytest.mark.parametrize("workflow", ["interrupted_by_terminal", "stopped_with_its_ranks"])
def test_ctrl_c_in_a_terminal_and_the_end_of_a_job_are_exit_code_130(
    workflow, tmp_path, toy_model_dir, toy_dataset, undisturbed
):
    """In step 3 the whole process group is interrupted, or the coordinator and its ranks get SIGHUP and SIGTERM: as for
    one process, a checkpoint, one line, 130. It goes on exactly. Red when the ranks do not ignore SIGTERM: they are
    lost before anything is saved."""
    with command(undisturbed, tmp_path, workflow, "algorithm.save_interval_steps=100") as process:
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert "sharpen: interrupted" in errors
    assert "Traceback" not in errors, errors
    assert not leftover_folders(process.pid)
    run_dir = tmp_path / "P" / "fixed"
    assert (run_dir / "latest").resolve().name == "global_step_2"
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 2
    assert list(rows(run_dir)) == [1, 2]
    run(tmp_path, toy_model_dir, toy_dataset, 1, **FIXED)
    assert_same_losses(undisturbed, run_dir)


def test_ctrl_c_in_a_terminal_while_the_ranks_load(tmp_path, undisturbed):
    """Red when the ranks are in the coordinator's process group (`process_group` in `_launch` left out): they are
    interrupted amid their imports, and say so at length."""
    with command(undisturbed, tmp_path, "letters", "train_dataset.total_steps=1000") as process:
        wait_for(lambda: len(ranks_of(process.pid)) == 2, process)
        ids = ranks_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors, errors
    assert all(ends(id_) for id_ in ids)
    assert not leftover_folders(process.pid)
