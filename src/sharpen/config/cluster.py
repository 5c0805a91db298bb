"""The section `cluster` of a run's configuration: where its parts run, with Ray."""

from __future__ import annotations

from pydantic import Field

from sharpen.config.public import Strict


class ClusterConfig(Strict):
    """Placement of the run's parts by Ray (`execution: ray`). Each of the `model.inference_engine_num` engines gets
    `model.tensor_parallel_size` GPUs, each of the `trainer.num_processes` ranks gets one."""

    ray_address: str | None = None
    """Address of a running Ray: `auto` on one of its machines, or `host:port`; None starts one on this machine."""
    num_workers: int = Field(default=2, ge=1)
    """Processes that run workflow and judge."""
    rollouts_per_worker: int = Field(default=128, ge=1)
    """Rollouts that run at the same time in one of these processes."""
    colocate: bool = False
    """One engine and one rank of the trainer share each GPU; false gives each its own GPUs."""
    worker_output: bool = False
    """Show the output of workflow and judge, each line with its process; else it goes only to Ray's logs."""
