"""The memory of this machine, as the kernel reports it. Imports only the standard library."""

from __future__ import annotations

import contextlib
import os


def available_bytes() -> int:
    """Return how much memory this process can still allocate, respecting a container's limit."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return available if limit is None else min(available, max(0, limit - (used or 0)))


def total_bytes() -> int:
    """Return the total memory of the machine including swap, respecting a container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal"))
    limit = _number("/sys/fs/cgroup/memory.max")
    return total if limit is None else min(total, limit)


def _number(path: str) -> int | None:
    """Return the number in a file of the kernel, or None if it has none (`max`, or no such file)."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
