"""A run that is cut off has said what failed by then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BODY = """
import time

def test_right():
    pass

def test_wrong():
    assert 6 * 7 == 41, "not the answer"

def test_cut_off():
    time.sleep(60)
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_that_is_killed_has_said_what_failed(tmp_path: Path, workers: str) -> None:
    """Killed as hard as can be while its last test waits. Without the plugin it says so at its end alone, a minute
    later."""
    (tmp_path / "test_one.py").write_text(BODY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "failures_at_once", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, "-n", workers, "--dist", "worksteal", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        start_new_session=True,
    )
    assert process.stdout is not None
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if "not the answer" in line and "AssertionError" in line:
                break
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert any("test_one.py::test_wrong" in line for line in said), said
    assert not any("= FAILURES =" in line for line in said), said
