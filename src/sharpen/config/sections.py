"""The small sections of a run's configuration: `cluster`, `gateway`, `journal` and `sync`."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from sharpen.config.doors import PartName
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
    """Show the output of workflow and judge, which else goes only to Ray's logs."""


class GatewayConfig(Strict):
    """How agents reach the model: the protocols that they speak, and the HTTP server for those in other processes; each
    needs its rollout's key."""

    protocols: tuple[Annotated[str, AfterValidator(PartName("protocols", ()))], ...] = ()
    """Protocols of your own beside ours, by import path or announced name (docs/use/extending.md). Endpoints elsewhere
    are not asked in them."""

    host: str = "127.0.0.1"
    """Address at which it listens; containers need another than the loopback (docs/use/commands.md)."""
    port: int = Field(default=0, ge=0, le=65535)
    """Its port; 0 is any free one. Not with Ray, where each process has its own."""

    max_body_mb: int = Field(default=64, ge=1, le=1024)
    """Megabytes of a request's body; larger ones are refused (413)."""
    max_header_kb: int = Field(default=64, ge=8, le=1024)
    """Kilobytes of a request's headers; larger ones are refused (400)."""
    max_connections: int = Field(default=8192, ge=1)
    """Connections at once; further ones are refused (429). At most half of the files that the process may open (`ulimit
    -Hn`)."""
    max_requests_per_key: int = Field(default=1024, ge=1)
    """Requests of one key at once; further ones are refused (429), and vendors' clients try again."""

    @field_validator("host")
    @classmethod
    def _is_address(cls, value: str) -> str:
        try:
            ip_address(value)
        except ValueError as error:
            raise ValueError(
                f"must be an IP address of this machine, like 0.0.0.0 or 172.17.0.1, got {value!r}"
            ) from error
        return value

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ip_address(self.host).is_loopback


class JournalConfig(Strict):
    """The journal of a run, `run.db`."""

    keep_steps: int | None = Field(default=None, ge=1)
    """Steps before the last checkpoint whose rollouts keep their text; ids, numbers and rewards of all stay
    (docs/use/long-runs.md). None keeps all."""


SyncStyle = Literal["fixed", "dynamic_by_explorer", "dynamic_by_trainer", "fully_async"]


class SyncConfig(Strict):
    """When the engine gets new weights, and how far rollouts run ahead of the trainer. The default is synchronous: a
    step's rollouts start once the engine serves the weights of the previous step."""

    style: SyncStyle = "fixed"
    """What starts a sync: `fixed`, both sides wait for each other; `dynamic_by_explorer`, the rollouts;
    `dynamic_by_trainer`, the trainer; `fully_async`, weights move while rollouts go on (docs/use/asynchronous.md)."""
    interval: int = Field(default=1, ge=1)
    """Steps between two syncs, counted on the side that starts them."""
    offset: int = Field(default=0, ge=0)
    """Batches rolled out before the first sync, beyond the first interval: the number of steps by which rollouts stay
    ahead. Not with `fully_async`."""
    max_staleness: int | None = Field(default=None, ge=1)
    """Greatest age of a step's oldest token, in policy versions (updates); rollouts wait rather than exceed it. None is
    what the style needs: the updates of `offset + interval - 1` steps, and of one more interval unless `fixed`."""
