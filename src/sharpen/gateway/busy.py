"""The time during which at least one request was at the engine.

In: the start and end of every request, on the serving loop. Out: seconds, readable from any thread.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType


class BusyClock:
    """A clock that runs while at least one `with` block of it is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since = 0.0
        self._seconds = 0.0
        self.num_ended = 0
        """How many blocks have ended."""

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._since = time.perf_counter()
            self._open += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._open -= 1
            self.num_ended += 1
            if self._open == 0:
                self._seconds += time.perf_counter() - self._since

    def seconds(self) -> float:
        """Return the seconds so far, including those of requests still open."""
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._open else 0.0)
