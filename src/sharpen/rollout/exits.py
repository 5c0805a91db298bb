"""Keeps user code in the run's own process from ending that process without a word.

In: nothing. Out: within the block, `os._exit` raises `SystemExit`, which costs one attempt, like `sys.exit`. A process
that was forked ends as ever. Code in C can still end the process: `rollout.isolation: process` is for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Never


@contextlib.contextmanager
def no_silent_exit() -> Iterator[None]:
    """Let `os._exit` raise `SystemExit` in this process."""
    leave, process = os._exit, os.getpid()

    def refuse(status: int) -> Never:
        if os.getpid() != process:
            leave(status)
        raise SystemExit(
            f"os._exit({status}) would have ended the whole run, not this attempt alone; code that must end its "
            "process needs one of its own (rollout.isolation: process)"
        )

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave
