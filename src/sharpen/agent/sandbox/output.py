"""The kept part of a command's output: its head and its tail.

In: bytes as they come. Out: text, with a line where bytes were left out.
"""

from __future__ import annotations


class Output:
    """Keeps the first and the last `limit / 2` bytes."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Add the next bytes."""
        self._num_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._half:  # cut seldom: each cut copies what is kept
            del self._tail[: -self._half]

    def text(self) -> str:
        """Return what was kept; bytes that are not UTF-8 are replaced."""
        tail = self._tail[-self._half :]
        left_out = self._num_bytes - len(self._head) - len(tail)
        mark = f"\n[... {left_out:,} bytes of output left out ...]\n" if left_out else ""
        return self._head.decode(errors="replace") + mark + tail.decode(errors="replace")
