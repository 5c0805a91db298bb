"""The memory of this machine, as the kernel counts it. Loads nothing."""

from __future__ import annotations

import contextlib
import os


def available_bytes() -> int:
    """Memory that this process can still take: what the kernel says is available, within a container's limit."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return found if limit is None else min(found, max(0, limit - (used or 0)))


def total_bytes() -> int:
    """All memory that this process could ever have: the machine's and what it may swap to, within a container's
    limit."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        found += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal"))
    limit = _number("/sys/fs/cgroup/memory.max")
    return found if limit is None else min(found, limit)


def _number(path: str) -> int | None:
    """The number in a file of the kernel; None where there is none (`max`, or no such file)."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
