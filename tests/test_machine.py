"""What is asked of the machine: memory that was freed goes back to the system."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sharpen.machine import FILLING_GAPS, filling_gaps

STATUS = Path("/proc/self/status")


def held() -> int:
    found = re.search(r"VmRSS:\s+(\d+)", STATUS.read_text())
    assert found is not None
    return 1024 * int(found[1])


PROGRAM = """
from test_machine import held
from sharpen.machine import return_freed_bytes
blocks = [(bytearray(b"1") * 100_000, bytearray(b"2") * 1000) for _ in range(2000)]
kept = [small for _, small in blocks]
del blocks
before = held()
return_freed_bytes(2**40)
print(before - held())
return_freed_bytes(150_000_000)
print(before - held())
"""


@pytest.mark.skipif(not STATUS.exists(), reason="the kernel's figures are Linux's")
def test_freed_blocks_go_back_where_they_are_enough() -> None:
    """200 MB in blocks of 100 kB, between each of which something stays, so that the allocator keeps them. Red where
    nothing is given back, or less than `least` is. In a process of its own, with no allocations but these."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=60)
    nothing, much = map(int, done.stdout.split())
    assert nothing < 20_000_000
    assert much > 150_000_000


BUFFERS = """
import torch
from test_machine import held
from sharpen.machine import return_freed_bytes
torch.set_num_threads(1)
first, second, out = torch.ones(512, 1024), torch.ones(8000, 1024), torch.ones(512, 8000)
return_freed_bytes()
torch.mm(first, second.t(), out=out)
before = held()
return_freed_bytes()
print(before - held() if torch.backends.mkl.is_available() else "another library's")
"""


@pytest.mark.skipif(not STATUS.exists(), reason="the kernel's figures are Linux's")
def test_what_a_product_has_packed_goes_back_too() -> None:
    """Red without `_return_buffers`: MKL keeps it for the next product. How much the processor decides: here 13 MB."""
    command = [sys.executable, "-c", BUFFERS]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=60)
    if done.stdout.startswith("another"):
        pytest.skip("the products are another library's")
    assert int(done.stdout) > 2_000_000


ANEW = """
import os, sys
from sharpen.machine import start_anew_filling_gaps
print("begins", flush=True)
start_anew_filling_gaps()
print(os.getpid(), sys.argv[1:], os.environ["GLIBC_TUNABLES"])
sys.exit(int(sys.stdin.read()))
"""


def started(environment: dict[str, str]) -> tuple[int, int, list[str]]:
    """Return the process, its exit code and its lines."""
    command = [sys.executable, "-W", "ignore", "-c", ANEW, "run", "--set", "a=b c"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        out, _ = process.communicate("7", timeout=60)
    return process.pid, process.returncode, out.splitlines()


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the settings are glibc's")
def test_a_command_starts_anew_once_with_the_allocator_that_fills_gaps() -> None:
    """The same process with the same arguments and streams; its exit code is the second program's."""
    without = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    process, code, lines = started(without)
    assert lines == ["begins", "begins", f"{process} ['run', '--set', 'a=b c'] {FILLING_GAPS}"]
    assert code == 7


def test_who_has_set_the_allocator_keeps_it() -> None:
    """A variable that is set is the user's: nothing starts anew, and processes that are started get theirs."""
    theirs = "glibc.malloc.arena_max=1"
    _, code, lines = started({**os.environ, "GLIBC_TUNABLES": theirs})
    assert [line.split()[-1] for line in lines] == ["begins", theirs]
    assert code == 7
    assert filling_gaps({"GLIBC_TUNABLES": theirs, "A": "b"}) == {"GLIBC_TUNABLES": theirs, "A": "b"}
    assert filling_gaps({"A": "b"}) == {"GLIBC_TUNABLES": FILLING_GAPS, "A": "b"}
