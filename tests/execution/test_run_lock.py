"""One run of a name at a time: the second is told who holds it, and the kernel gives it back."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sharpen.errors import ConfigError
from sharpen.execution.run_lock import locked

HOLDS = """
import os, sys, time
from pathlib import Path
from sharpen.execution.run_lock import locked

with locked(Path(sys.argv[1])):
    child = os.fork() if "fork" in sys.argv else 0
    if "fork" in sys.argv and child == 0:
        os.close(1)
        time.sleep(60)
    print(child, flush=True)
    time.sleep(60)
"""


def hold(folder: Path, *how: str) -> tuple[subprocess.Popen[str], int]:
    """A process that holds the folder, and its child's id."""
    command = [sys.executable, "-c", HOLDS, str(folder), *how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_the_second_run_of_a_name_is_told_who_holds_it_until_a_kill_frees_it(tmp_path: Path):
    process, _ = hold(tmp_path)
    with process:
        said = rf"the run .* is in use: process {process.pid} on {re.escape(socket.gethostname())} has it"
        with (
            pytest.raises(ConfigError, match=rf"{said} since \d{{4}}-\d\d-\d\d .*another experiment_name"),
            locked(tmp_path),
        ):
            pass
        process.kill()
    with locked(tmp_path) as note:
        assert note == ""
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert json.loads((tmp_path / "run.lock").read_text()) == {}


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(tmp_path: Path):
    """Red without `register_at_fork`: a pool of the agent's, left behind, would hold the run for ever."""
    process, child = hold(tmp_path, "fork")
    with process:
        process.kill()
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_second_run_in_the_same_process_is_refused_and_a_failed_one_gives_it_back(tmp_path: Path):
    def fail() -> None:
        with locked(tmp_path):
            raise ZeroDivisionError

    def twice() -> None:
        with locked(tmp_path), locked(tmp_path):
            pass

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        twice()
    with locked(tmp_path):
        pass
