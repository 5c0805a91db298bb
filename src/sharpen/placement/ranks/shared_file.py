"""Shared memory: an unnamed file whose descriptor child processes inherit.

In: a size. Out: the same memory in every process that has the descriptor. The memory is freed with the last of these
processes, however it ends.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile


class SharedFile:
    """An unnamed file that can grow. A mapping covers the size at the time it was made."""

    def __init__(self, descriptor: int) -> None:
        """Wrap an inherited descriptor."""
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> SharedFile:
        """Create an empty file: in memory on Linux (not limited by a container's /dev/shm), else on disk."""
        if sys.platform == "linux":
            return cls(os.memfd_create("sharpen"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def grow(self, size: int) -> None:
        """Extend the file to at least `size` bytes. Existing mappings stay valid, and memory is allocated on
        writing."""
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)

    def map(self, *, private: bool = False) -> mmap.mmap:
        """Map the file. Writes to a `private` mapping are not seen by other processes."""
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        return mmap.mmap(self.descriptor, 0, access=access)

    def close(self) -> None:
        """Close the descriptor; mappings stay valid."""
        os.close(self.descriptor)
