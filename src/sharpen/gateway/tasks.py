"""The asyncio tasks of one attempt, which are cancelled when it ends.

In: tasks, on their loop. Out: their cancellation.
"""

from __future__ import annotations

import asyncio
from typing import Any


class TaskSet:
    """The tasks of one attempt on one loop. `closed`: they are being cancelled, and no more should be added."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.closed = False
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        """Add a task, to be cancelled by `close`. On the loop."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel all tasks without waiting for them. From any thread, even if the loop is closed."""
        self.closed = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
