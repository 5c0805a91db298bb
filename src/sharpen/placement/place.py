"""The interfaces through which the coordinator uses a run's parts, in this process or in actors of Ray.

In: nothing. Out: `Place` and `Serving`; `start` makes the objects that satisfy them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sharpen.agent.rollout.in_process import Opener
from sharpen.agent.rollout.retries import Ending
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.contracts import Engine
from sharpen.placement.auxiliary.models import AuxiliaryMeters
from sharpen.types import Experience, IntArray, Mode, Outcome

if TYPE_CHECKING:
    import torch

    from sharpen.placement.ranks.group import StartRanks


class Place(Protocol):
    """Where a run's parts live. `ranks` starts the ranks of the trainer there (None: the trainer runs on this machine);
    `line` describes the place to the user."""

    @property
    def ranks(self) -> StartRanks | None: ...
    @property
    def line(self) -> str: ...
    def close(self) -> None: ...


class Serving(Place, Protocol):
    """The engines of the trained model and of the auxiliary models. `runner` runs rollouts, `modes` maps each mode to
    the opener of a rollout's models, `folder` holds the trained model's files."""

    folder: Path
    runner: RolloutRunner
    modes: Mapping[Mode, Opener]

    @property
    def auxiliary(self) -> AuxiliaryMeters: ...
    @property
    def engine(self) -> Engine: ...
    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights into the engines and wait until they serve them. Auxiliary models keep their weights."""

    def rest(self) -> None:
        """Let an engine that shares the trainer's memory give back that of its cache, which no call will need: between
        rollouts, evaluations and training."""

    def probe(self, prompt_ids_P: IntArray, *, noise: int, temperature: float) -> Future[tuple[Experience, ...]]:
        """Start sampling probes with the served weights; see `placement.probe`."""

    def auxiliary_models(self, name: str) -> AbstractContextManager[Mapping[str, Any]]:
        """Open the auxiliary models for a block of this process that belongs to no rollout but has a `name`; none where
        they serve in other processes."""

    def num_answered(self) -> int:
        """Return how many calls of the trained model have ended so far, as far as this process knows."""

    def generating_s(self) -> float:
        """Return the seconds so far in which the engine had a request. Of several engines the busiest counts, in each
        span between two calls."""


# How an attempt ended whose process was lost.
#
# In: what is known of the process. Out: `Ending`. Used for processes of this machine and for workers of Ray.

HARD_GRACE_S = 10.0
"""How long after its time limit an attempt may still hold its process."""


def held_ending(timeout_s: float) -> Ending:
    """Return the ending of an attempt that held its process until that was killed."""
    text = f"held its process past the time limit of {timeout_s:g} s and could not be interrupted: killed"
    return Ending(outcome=Outcome.BLOCKED_LOOP, error=text)


def died_ending(reason: str, words: str | None = None) -> Ending:
    """Return the ending of an attempt whose process died. `words` are the last that it wrote to standard error."""
    return Ending(outcome=Outcome.WORKFLOW_ERROR, error=f"its process {reason}", traceback=words or None)
