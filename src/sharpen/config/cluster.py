"""Where the parts of a run live once they outgrow one process: the section `cluster` of a run's configuration."""

from __future__ import annotations

from pydantic import Field

from sharpen.config.public import Strict


class ClusterConfig(Strict):
    """What Ray places where, with `execution: ray`. GPUs by role: each of `model.inference_engine_num` engines has
    `model.tensor_parallel_size`, each of `trainer.num_processes` ranks has one."""

    ray_address: str | None = None
    """Address of a running Ray: `auto` on one of its machines, or `host:port`; None starts one on this machine."""
    num_workers: int = Field(default=2, ge=1)
    """Processes in which workflow and judge run."""
    rollouts_per_worker: int = Field(default=128, ge=1)
    """Rollouts that one of them runs at the same time."""
    colocate: bool = False
    """Each GPU has an engine and a rank of the trainer, which share it; false gives every one GPUs of its own."""
    worker_output: bool = False
    """Show what workflow and judge print, each line with its process; else it is in Ray's logs."""
