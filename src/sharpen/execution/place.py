"""What the coordinator knows of where a run's parts are: in this process, or in actors of Ray.

In: nothing. Out: the two interfaces; `start` makes what satisfies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sharpen.execution.auxiliary.models import AuxiliaryMeters
from sharpen.inference.engine import Engine
from sharpen.rollout.in_process import Opener
from sharpen.rollout.runner import RolloutRunner
from sharpen.types import Experience, IntArray, Mode

if TYPE_CHECKING:
    import torch

    from sharpen.execution.ranks.group import StartRanks


class Place(Protocol):
    """Where a run's parts are; `ranks` starts the trainer's there (None: it trains here), `line` tells the user."""

    @property
    def ranks(self) -> StartRanks | None: ...
    @property
    def line(self) -> str: ...
    def close(self) -> None: ...


class Serving(Place, Protocol):
    """A model that serves rollouts, and the auxiliary models beside it. `runner` runs them, `modes` says how their
    models are opened in each mode; `folder` holds the model's files."""

    folder: Path
    runner: RolloutRunner
    modes: Mapping[Mode, Opener]

    @property
    def auxiliary(self) -> AuxiliaryMeters: ...
    @property
    def engine(self) -> Engine: ...
    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights into the engines; returns when they serve them. Those of auxiliary models never change."""

    def probe(self, prompt_ids_P: IntArray, *, noise: int, temperature: float) -> Future[tuple[Experience, ...]]:
        """Begin to sample probes with the weights that serve; see `execution.probe`."""

    def generating_s(self) -> float:
        """Seconds so far in which an engine had a request to work on; of several the busiest one in each span."""
