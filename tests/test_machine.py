"""What is asked of the machine: memory that was freed goes back to the system."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
