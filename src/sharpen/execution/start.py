"""Where the serving side of a run lives: in this process, or in actors of Ray.

In: a `RunConfig`, the user's functions. Out: `Serving`, which is all that the coordinator knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharpen.config.cluster import ClusterConfig
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.execution.engine_choice import choose_engine
from sharpen.execution.local import LocalServing
from sharpen.execution.place import Place, Serving


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
) -> Serving:
    """Load the configured models and start serving them; see `local.LocalServing` and `cluster.serving.RayServing`."""
    if not config.uses_ray:
        return LocalServing(config, workflow, judge, needs_reward=needs_reward)
    from sharpen.execution.cluster.serving import RayServing

    return RayServing(config, workflow, judge, needs_reward=needs_reward)


def start_training(config: RunConfig) -> Place | None:
    """Where a run trains that serves nothing; None is this machine. Raises `ConfigError` if Ray cannot be had."""
    if not config.uses_ray:
        return None
    from sharpen.execution.cluster.training import RayTraining

    return RayTraining(config)
