"""Bounds the memory and the number of processes of running commands.

In: the process of each command's keeper, and its limits. Out: the end of its lifeline when it is over one. One thread
looks for all commands of this process, since each look reads the table of all processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from sharpen.agent.sandbox.command import Lifeline, Limits
from sharpen.agent.sandbox.keeper import processes

LOOK_EVERY_S = 0.2
SHARE = 0.05
"""At most this share of one core goes into looking: with many processes the looks become fewer."""

_lock = threading.Lock()
_watched: dict[int, tuple[Limits, Lifeline]] = {}
"""By the keeper's process."""
_running = False


@contextlib.contextmanager
def watched(keeper: int, limits: Limits, lifeline: Lifeline, *, active: bool) -> Iterator[None]:
    """Watch the processes below a keeper, if there is a limit to watch."""
    if not active or (limits.memory_mb is None and limits.max_processes is None):
        yield
        return
    with _lock:
        _watched[keeper] = (limits, lifeline)
        _start()
    try:
        yield
    finally:
        with _lock:
            _watched.pop(keeper, None)


def _start() -> None:
    """Start the thread if it does not run. With the lock."""
    global _running
    if not _running:
        _running = True
        threading.Thread(target=_watch, name="sharpen-watch-commands", daemon=True).start()


def _watch() -> None:
    """Look until there is nothing to watch."""
    global _running
    while True:
        with _lock:
            if not _watched:
                _running = False
                return
            looked_at = dict(_watched)
        began = time.perf_counter()
        usage = usage_below(set(looked_at))
        for keeper, (limits, lifeline) in looked_at.items():
            num_processes, num_bytes = usage[keeper]
            if limits.max_processes is not None and num_processes > limits.max_processes:
                lifeline.end("processes")
            elif limits.memory_mb is not None and num_bytes > limits.memory_mb * 2**20:
                lifeline.end("memory")
        time.sleep(max(LOOK_EVERY_S, (time.perf_counter() - began) / SHARE))


def usage_below(keepers: set[int]) -> dict[int, tuple[int, int]]:
    """Return for each keeper how many processes there are below it, and their resident bytes."""
    rows = processes()
    parents = {process.id: process.parent for process in rows}
    usage = dict.fromkeys(keepers, (0, 0))
    for process in rows:
        parent, seen = process.parent, {process.id}
        while parent not in keepers and parent in parents and parent not in seen:
            seen.add(parent)
            parent = parents[parent]
        if parent in keepers:
            number, total = usage[parent]
            usage[parent] = (number + 1, total + process.num_bytes)
    return usage
