"""What a run trains on and what it is examined by.

In: datasets, read and split. Out: `RunData`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sharpen.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Tasks (or rows) to train on; `tasks` that the agent is evaluated on, `further` ones by name; `rows` whose loss is
    measured; an `expert`'s rows; and what to tell the user."""

    training: Sequence[Task]
    tasks: Sequence[Task] = ()
    further: Mapping[str, Sequence[Task]] = field(default_factory=dict)
    rows: Sequence[Task] = ()
    expert: Sequence[Task] = ()
    messages: tuple[str, ...] = ()

    @property
    def held_out(self) -> Sequence[Task]:
        """What is not trained on, whatever is done with it."""
        return self.tasks or self.rows
