"""Memory that processes share: an unlinked file that child processes inherit by its descriptor.

In: bytes, or tensors to make room for. Out: the same memory in every process that has the descriptor. It has no name,
so that it is gone when the last of them is, however that ends.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile


class SharedFile:
    """Grows when asked to; a mapping holds what was there when it was made."""

    def __init__(self, descriptor: int) -> None:
        """Take over a descriptor, which was inherited."""
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> SharedFile:
        """A new, empty one: in memory on Linux (whatever size a container gives to /dev/shm), else on the disk."""
        if sys.platform == "linux":
            return cls(os.memfd_create("sharpen"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def grow(self, size: int) -> None:
        """Make it so long, if it is shorter: what others have mapped stays. Memory is taken as it is written."""
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)

    def map(self, *, private: bool = False) -> mmap.mmap:
        """Its bytes, shared; `private` ones can be written without others seeing it."""
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        return mmap.mmap(self.descriptor, 0, access=access)

    def close(self) -> None:
        """Let go of it; mappings stay."""
        os.close(self.descriptor)
