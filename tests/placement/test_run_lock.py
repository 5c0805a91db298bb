"""One run of a name at a time: the second is told who holds it, and the kernel gives it back."""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import line_of, python

from sharpen.errors import ConfigError
from sharpen.run.lock import locked

HOLDS = """
import os, sys, time
from pathlib import Path
from sharpen.run.lock import locked

with locked(Path(sys.argv[1])):
    if "fork" not in sys.argv or os.fork() == 0:
        print(os.getpid(), flush=True)  # the child itself, so that it has begun
        os.close(1)
    time.sleep(60)
"""


@contextmanager
def holding(folder: Path, *how: str) -> Iterator[tuple[int, int]]:
    """The ids of a process that holds the folder, and of its child if it has one; it is killed at the end."""
    with python("-c", HOLDS, str(folder), *how) as process:
        yield process.pid, int(line_of(process))


def test_the_second_run_of_a_name_is_told_who_holds_it_until_a_kill_frees_it(tmp_path: Path):
    with holding(tmp_path) as (holder, _):
        said = rf"the run .* is in use: process {holder} on {re.escape(socket.gethostname())} has it"
        with (
            pytest.raises(ConfigError, match=rf"{said} since \d{{4}}-\d\d-\d\d .*another name"),
            locked(tmp_path),
        ):
            pass
    with locked(tmp_path) as note:
        assert note == ""
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert json.loads((tmp_path / "run.lock").read_text()) == {}


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(tmp_path: Path):
    """Red without `register_at_fork`: a pool of the agent's, left behind, would hold the run for ever."""
    with holding(tmp_path, "fork") as (_, child):
        pass
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
