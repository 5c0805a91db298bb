"""The data of a run: what it trains on, and what it is evaluated on.

In: datasets, already read and split. Out: `RunData`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sharpen.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The data of a run.

    `training`: tasks or rows to train on. `tasks`: tasks to evaluate the agent on; `further`: more of these, by name.
    `rows`: rows to measure the loss on. `expert`: rows of an expert. `messages`: what to tell the user.
    """

    training: Sequence[Task]
    tasks: Sequence[Task] = ()
    further: Mapping[str, Sequence[Task]] = field(default_factory=dict)
    rows: Sequence[Task] = ()
    expert: Sequence[Task] = ()
    messages: tuple[str, ...] = ()

    @property
    def held_out(self) -> Sequence[Task]:
        """The tasks or rows that are held out from training."""
        return self.tasks or self.rows
