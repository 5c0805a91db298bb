"""The chunks of a response that is sent while it is sampled.

In: chunks, pushed on the serving loop. Out: the same chunks, in order, to one reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Sink = Callable[[bytes, bool], None]
"""Receives each chunk, and whether it is the last."""


class Stream:
    """A response in the making. Every method runs on the serving loop.

    `begun` is set with the first chunk. `complete`: the last chunk is there and ends a whole answer, not an error.
    `task` makes the chunks; it is set by whoever starts it.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.complete = False
        self.task: asyncio.Task[None] | None = None
        self._waiting: list[tuple[bytes, bool]] = []
        self._sink: Sink | None = None

    def push(self, chunk: bytes) -> None:
        """Add a chunk."""
        if chunk:
            self._give(chunk, last=False)
            self.begun.set()

    def end(self, chunk: bytes, *, complete: bool) -> None:
        """Add the last chunk."""
        self.complete = complete
        self._give(chunk, last=True)
        self.begun.set()

    def read(self, sink: Sink) -> None:
        """Give all chunks so far, and each later one, to `sink`."""
        self._sink = sink
        waiting, self._waiting = self._waiting, []
        for chunk, last in waiting:
            sink(chunk, last)

    def cancel(self) -> None:
        """Stop sampling: the reader has gone."""
        if self.task is not None:
            self.task.cancel()

    def _give(self, chunk: bytes, *, last: bool) -> None:
        if self._sink is None:
            self._waiting.append((chunk, last))
        else:
            self._sink(chunk, last)
