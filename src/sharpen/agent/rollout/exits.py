"""Keeps user code in the run's own process from ending that process without a word.

In: nothing. Out: within the block, `os._exit` raises `SystemExit`, which costs one attempt, like `sys.exit`. A process
that was forked ends as ever. Code in C can still end the process: `rollout.isolation: process` is for that.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Never

_leave = os._exit
_lock = threading.Lock()
_open: Counter[int] = Counter()
"""How many blocks are open, by process: two runs of one process may overlap, and end in any order."""


@contextlib.contextmanager
def no_silent_exit() -> Iterator[None]:
    """Let `os._exit` raise `SystemExit` in this process."""
    process = os.getpid()
    with _lock:
        _open[process] += 1
        os._exit = _refuse
    try:
        yield
    finally:
        with _lock:
            _open[process] -= 1
            if not _open[process] and os._exit is _refuse:
                os._exit = _leave


def _refuse(status: int) -> Never:
    if not _open[os.getpid()]:
        _leave(status)
    raise SystemExit(
        f"os._exit({status}) would have ended the whole run, not this attempt alone; code that must end its "
        "process needs one of its own (rollout.isolation: process)"
    )
