"""The section `journal` of a run's configuration: how long `run.db` keeps what was said."""

from __future__ import annotations

from pydantic import Field

from sharpen.config.public import Strict


class JournalConfig(Strict):
    """The journal of a run, `run.db`."""

    keep_steps: int | None = Field(default=None, ge=1)
    """Steps before the last checkpoint whose rollouts keep their text: messages, answers, tracebacks. Of older ones,
    and of evaluations before them, it is dropped when a checkpoint is saved; token ids, numbers and rewards stay
    (docs/use/long-runs.md). None keeps all."""
