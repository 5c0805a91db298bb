"""When new weights reach the engine: the section `sync` of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpen.config.public import Strict

SyncStyle = Literal["fixed", "dynamic_by_explorer", "dynamic_by_trainer", "fully_async"]


class SyncConfig(Strict):
    """When new weights reach the engine, and how far rollouts run ahead of the training. The defaults are synchronous:
    a step's rollouts begin when the step before has trained and its weights serve."""

    style: SyncStyle = "fixed"
    """Who waits for whom: `fixed`, both sides meet; `dynamic_by_explorer`, the side that rolls out asks;
    `dynamic_by_trainer`, the trainer asks; `fully_async`, weights move while rollouts go on
    (docs/use/asynchronous.md)."""
    interval: int = Field(default=1, ge=1)
    """Steps between two syncs, of whoever asks."""
    offset: int = Field(default=0, ge=0)
    """Batches that are rolled out, beyond the first interval, before the first sync: so many steps the rollouts stay
    ahead. Not with `fully_async`."""
    max_staleness: int | None = Field(default=None, ge=1)
    """Policy versions (updates) that the oldest token of a step may be behind; rollouts wait rather than become older.
    None takes what the style needs: `offset + interval - 1` steps' updates, and one interval more where it is not
    `fixed`."""
