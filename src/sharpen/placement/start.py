"""Starts the serving side of a run, in this process or in actors of Ray.

In: a `Job`. Out: `Serving`, the interface that the coordinator uses.
"""

from __future__ import annotations

from sharpen.learning.recipe import Job, Recipe
from sharpen.placement.local import LocalServing
from sharpen.placement.place import Place, Serving


def start_serving(job: Job[Recipe]) -> Serving:
    """Load the job's models and start serving them; see `local.LocalServing` and `cluster.serving.RayServing`."""
    if not job.config.uses_ray:
        return LocalServing(job)
    from sharpen.placement.cluster.serving import RayServing

    return RayServing(job)


def start_training(job: Job[Recipe]) -> Place | None:
    """Reserve the place of a trainer without engines; None is this machine. Raises `ConfigError` if Ray is not
    available."""
    if not job.config.uses_ray:
        return None
    from sharpen.placement.cluster.placement import RayTraining

    return RayTraining(job.config)
