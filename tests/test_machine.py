"""What is asked of the machine: memory that was freed goes back to the system."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sharpen.machine import return_freed_bytes

STATUS = Path("/proc/self/status")


def held() -> int:
    found = re.search(r"VmRSS:\s+(\d+)", STATUS.read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.skipif(not STATUS.exists(), reason="the kernel's figures are Linux's")
def test_freed_blocks_go_back_where_they_are_enough() -> None:
    """200 MB in blocks of 100 kB, between each of which something stays, so that the allocator keeps them. Red where
    nothing is given back, or less than `least` is."""
    blocks = [(bytearray(b"1") * 100_000, bytearray(b"2") * 1000) for _ in range(2000)]
    kept = [small for _, small in blocks]
    del blocks
    before = held()
    return_freed_bytes(2**40)
    assert before - held() < 20_000_000
    return_freed_bytes(150_000_000)
    assert before - held() > 150_000_000
    assert len(kept) == 2000
