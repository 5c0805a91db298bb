"""Code that ends its process, in the run's own process: an attempt fails, and nothing ends in silence."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import sys
import textwrap
from typing import Any

from scripted_serving import MakeRunner, make_task

from sharpen.agent.rollout.in_process import no_silent_exit
from sharpen.agent.rollout.user_loop import owner
from sharpen.show.monitor.stream import MAX_WRITTEN, lasting_output
from sharpen.types import Outcome

LIMIT_S = 240


def test_os_exit_costs_one_attempt(make_runner: MakeRunner) -> None:
    """Without the guard this ends the test process with code 0."""

    async def workflow(task: Any, model: Any) -> float:
        if task["question"] == "q1":
            os._exit(0)
        if task["question"] == "q2":
            await asyncio.to_thread(os._exit, 0)
        return 1.0

    real = os._exit
    with no_silent_exit():
        runner = make_runner(workflow, max_attempts=1, group_size=1)
        groups = runner.run([make_task(number) for number in range(3)], group_ids=["a", "b", "c"])
        assert os.waitstatus_to_exitcode(_status_of_a_child()) == 7
    assert os._exit is real
    first, second, third = (group.rollouts[0] for group in groups)
    assert first.reward == 1.0
    for rollout in (second, third):
        assert rollout.outcome == Outcome.WORKFLOW_ERROR
        assert "os._exit(0)" in str(rollout.error)
        assert "rollout.isolation: process" in str(rollout.error)


def test_blocks_that_overlap_and_end_out_of_order_leave_nothing_behind() -> None:
    """Red when each restores what it found: the second found the first's."""
    real, first, second = os._exit, no_silent_exit(), no_silent_exit()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os._exit is not real
    second.__exit__(None, None, None)
    assert os._exit is real


def _status_of_a_child() -> int:
    """Fork a process that ends by `os._exit`, as those of multiprocessing do."""
    child = os.fork()
    if child == 0:
        os._exit(7)
    return os.waitpid(child, 0)[1]


def test_a_rollout_that_writes_without_end_is_cut_off(make_runner: MakeRunner) -> None:
    """Red when `LastingStream` passes on whatever comes: 80 MB of one workflow flooded a log."""

    async def workflow(task: Any, model: Any) -> float:
        for _ in range(80):
            print("x" * 100_000)
        return 1.0

    with contextlib.redirect_stdout(io.StringIO()) as shown, lasting_output(owner.get):
        print("y" * (MAX_WRITTEN + 1))  # the run itself may
        make_runner(workflow, group_size=2).run([make_task()], group_ids=["g"])
    text = shown.getvalue()
    assert text.count("y") == MAX_WRITTEN + 1
    assert text.count("x") <= 2 * MAX_WRITTEN
    assert text.count("wrote more than 1,000,000 characters") == 2
    assert "rollout g/1 wrote more" in text


def test_what_is_registered_for_the_end_is_not_cut_off() -> None:
    """Red when the process ends though no thread is left: W&B's last upload was lost."""
    program = """
        import atexit, sys, threading, time
        import sharpen.cli.main as cli

        def upload():
            (end,) = (one for one in threading.enumerate() if one.name == "sharpen-end")
            go.set()
            end.join()
            print("uploaded")

        class Slow:
            sleep = staticmethod(lambda seconds: go.wait())

        go = threading.Event()
        cli.time = Slow
        atexit.register(upload)
        sys.argv = ["sharpen", "algorithms"]
        sys.exit(cli.entry())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("uploaded\n")


def test_what_such_threads_have_printed_is_shown() -> None:
    program = """
        import threading
        import sharpen.cli.main as cli
        threading.Thread(target=threading.Event().wait, name="poller").start()
        print("the last words", end="")
        cli.END_S = 0.0
        cli._end_anyway(3)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=buffered)
    assert (ended.returncode, ended.stdout) == (3, "the last words")


def test_a_thread_that_is_left_running_does_not_keep_a_command_alive() -> None:
    """Red when the command ends as Python does: this waits for an hour."""
    program = """
        import sys, threading, time
        import sharpen.cli.main as cli
        threading.Thread(target=time.sleep, args=(3600,), name="poller").start()
        cli.END_S = 0.01
        sys.argv = ["sharpen", "algorithms"]
        sys.exit(cli.entry())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0
    assert "grpo" in ended.stdout
    assert "poller" in ended.stderr
