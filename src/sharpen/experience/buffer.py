"""The buffer of scored groups between rollouts and training.

In: groups, as they are finished. Out: groups to train on, first in, first out, each already in the journal on disk.
"""

from __future__ import annotations

from collections import deque

from sharpen.experience.journal import Journal
from sharpen.types import Group


class Buffer:
    """Holds immutable groups in memory; used from one thread (the coordinator's)."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version at which a waiting group was started; None if there is none."""
        return min((group.version for group in self._groups), default=None)

    def add(self, group: Group) -> None:
        """Take a group in, journal first. Raises `JournalError` if the journal failed."""
        self._journal.add(group)
        self._groups.append(group)

    def draw(self, num_groups: int) -> tuple[Group, ...]:
        """Remove and return the `num_groups` oldest groups, once all of them are on disk.

        Raises `ValueError` if there are fewer, `JournalError` if they could not be written (they stay in the buffer).
        """
        if num_groups > len(self._groups):
            raise ValueError(f"{num_groups} groups asked for, {len(self._groups)} in the buffer")
        self._journal.flush()
        return tuple(self._groups.popleft() for _ in range(num_groups))
