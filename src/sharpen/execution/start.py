"""Where the serving side of a run lives: in this process, or in actors of Ray.

In: a `RunConfig`, the user's functions. Out: `Served`, which is all that the coordinator knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sharpen.config.cluster import ClusterConfig
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.execution.engine_choice import choose_engine
from sharpen.execution.local import Mode, Serving
from sharpen.inference.engine import Engine
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


def check_execution(config: RunConfig, *, serves: bool = True) -> None:
    """Raise `ConfigError` for an engine (if one `serves`) or a Ray that cannot be had, as far as that is known before
    anything starts."""
    if not config.uses_ray:
        if config.cluster != ClusterConfig():
            raise ConfigError(
                "the settings of cluster have no effect with execution: local: set it to ray, or remove them"
            )
        if serves:
            choose_engine(config)
        return
    if (device := config.engine.device).startswith("cuda:"):
        raise ConfigError(f"engine.device is {device}, but Ray gives GPUs out: set it to cuda")
    from sharpen.execution.cluster.connect import check_ray

    check_ray()


def start_serving(
    config: RunConfig,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    *,
    needs_reward: bool = True,
) -> Served:
    """Load the configured models and start serving them; see `local.Serving` and `cluster.serving.RayServing`."""
    if not config.uses_ray:
        return Serving(config, workflow, judge, needs_reward=needs_reward)
    from sharpen.execution.cluster.serving import RayServing

    return RayServing(config, workflow, judge, needs_reward=needs_reward)


def start_training(config: RunConfig) -> Place | None:
    """Where a run trains that serves nothing; None is this machine. Raises `ConfigError` if Ray cannot be had."""
    if not config.uses_ray:
        return None
    from sharpen.execution.cluster.training import RayTraining

    return RayTraining(config)
