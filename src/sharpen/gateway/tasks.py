"""What runs on one loop for one attempt, to be cancelled with it.

In: tasks, on their loop. Out: their end, once the attempt has ended.
"""

from __future__ import annotations

import asyncio
from typing import Any


class TaskSet:
    """Tasks of one loop. `closed`: no more are wanted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.closed = False
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        """Cancel this task when the set is closed. On the loop."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel them, without waiting for their end. From any thread, also when the loop is closed."""
        self.closed = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
