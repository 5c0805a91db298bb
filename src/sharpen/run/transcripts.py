"""The rollouts of evaluations and of the check before training, kept in a journal of their own: none of them trains.

In: groups. Out: `evaluations.db`, created with the first group.
"""

from __future__ import annotations

from pathlib import Path

from sharpen.learning.experience.journal import Journal
from sharpen.types import Group


class Transcripts:
    """The journal of rollouts that never train, at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal: Journal | None = None

    def add(self, group: Group) -> None:
        """Add a group. Raises `JournalError` if an earlier one could not be written."""
        if self._journal is None:
            self._journal = Journal(self._path)
        self._journal.add(group)

    def trim(self, until: int) -> None:
        """Drop the text of the evaluations before steps up to `until`, also of earlier sessions. Those before and after
        the training, which are compared, keep theirs. Raises as `add`."""
        if self._journal is None and self._path.exists():
            self._journal = Journal(self._path)
        if self._journal is not None:
            self._journal.trim(until)

    def flush(self) -> None:
        """Wait until all groups so far are on disk. Raises as `add`."""
        if self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        """Write the remaining groups and close the journal."""
        if self._journal is not None:
            self._journal.close()
