"""What the agent did when it was evaluated: rollouts in a journal of their own.

In: groups. Out: `evaluations.db`, made when there is something to keep.
"""

from __future__ import annotations

from pathlib import Path

from sharpen.experience.journal import Journal
from sharpen.types import Group


class Transcripts:
    """The rollouts of evaluations, at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal: Journal | None = None

    def add(self, group: Group) -> None:
        """Keep a group. Raises `JournalError` if an earlier one could not be written."""
        if self._journal is None:
            self._journal = Journal(self._path)
        self._journal.add(group)

    def close(self) -> None:
        """Write what is left."""
        if self._journal is not None:
            self._journal.close()
