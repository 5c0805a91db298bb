"""Where the serving side of a run lives: in this process, or in actors of Ray.

In: a `Job`. Out: `Served`, which is all that the coordinator knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sharpen.config.run import RunConfig
from sharpen.execution.local import Mode, Serving
from sharpen.inference.engine import Engine
from sharpen.recipe import Job, Recipe
from sharpen.rollout.in_process import Opens
from sharpen.rollout.runner import RolloutRunner
from sharpen.types import Experience, IntArray

if TYPE_CHECKING:
    import torch

    from sharpen.execution.ranks.group import StartRanks


class Used(Protocol):
    """What the auxiliary models of a run were used for."""

    @property
    def total_tokens(self) -> Mapping[str, int]: ...
    def restore(self, total_tokens: Mapping[str, int]) -> None: ...


class Place(Protocol):
    """Where a run's parts are; `ranks` starts the trainer's there (None: it trains here), `line` tells the user."""

    @property
    def ranks(self) -> StartRanks | None: ...
    @property
    def line(self) -> str: ...
    def close(self) -> None: ...


class Served(Place, Protocol):
    """A model that serves rollouts, wherever it is. `runner` runs them; `recorded` and `baseline` say how sessions are
    opened for training, `modes` how for evaluation; `folder` holds the model's files."""

    folder: Path
    runner: RolloutRunner
    recorded: Opens
    baseline: Opens
    modes: Mapping[Mode, Opens]

    @property
    def auxiliary(self) -> Used: ...
    @property
    def engine(self) -> Engine: ...
    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None: ...
    def probe(
        self, prompt_ids_P: IntArray, *, noise: int, temperature: float | None = None
    ) -> Future[tuple[Experience, ...]]: ...
    def generating_s(self) -> float: ...


def start_serving(job: Job[Recipe]) -> Served:
    """Load the job's models and start serving them; see `local.Serving` and `cluster.serving.RayServing`."""
    if not job.config.uses_ray:
        return Serving(job)
    from sharpen.execution.cluster.serving import RayServing

    return RayServing(job)


def start_training(config: RunConfig) -> Place | None:
    """Where a run trains that serves nothing; None is this machine. Raises `ConfigError` if Ray cannot be had."""
    if not config.uses_ray:
        return None
    from sharpen.execution.cluster.training import RayTraining

    return RayTraining(config)
