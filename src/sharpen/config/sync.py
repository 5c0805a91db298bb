"""The section `sync` of a run's configuration: when the engine gets new weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpen.config.public import Strict

SyncStyle = Literal["fixed", "dynamic_by_explorer", "dynamic_by_trainer", "fully_async"]


class SyncConfig(Strict):
    """When the engine gets new weights, and how far rollouts run ahead of the trainer. The default is synchronous: a
    step's rollouts start once the engine serves the weights of the previous step."""

    style: SyncStyle = "fixed"
    """What starts a sync: with `fixed` both sides wait for each other; with `dynamic_by_explorer` the rollouts start
    it, with `dynamic_by_trainer` the trainer; with `fully_async` weights move while rollouts continue
    (docs/use/asynchronous.md)."""
    interval: int = Field(default=1, ge=1)
    """Steps between two syncs, counted on the side that starts them."""
    offset: int = Field(default=0, ge=0)
    """Batches rolled out before the first sync, beyond the first interval: the number of steps by which rollouts stay
    ahead. Not with `fully_async`."""
    max_staleness: int | None = Field(default=None, ge=1)
    """Greatest age of a step's oldest token, in policy versions (updates); rollouts wait rather than exceed it. None is
    what the style needs: the updates of `offset + interval - 1` steps, and of one more interval unless `fixed`."""
