"""The section `gateway` of a run's configuration: where agents in other processes reach the model."""

from __future__ import annotations

from ipaddress import ip_address

from pydantic import Field, field_validator

from sharpen.config.public import Strict


class GatewayConfig(Strict):
    """The HTTP server through which agents in other processes reach the model; each needs its rollout's key."""

    host: str = "127.0.0.1"
    """Address at which it listens. Containers need another than the loopback: that of their bridge, or `0.0.0.0` for
    every network of the machine (docs/use/commands.md)."""
    port: int = Field(default=0, ge=0, le=65535)
    """Its port, for firewalls that let one through; 0 is any free one. Auxiliary models have servers of their own, at
    any free port. Not with Ray, where each process has its own."""

    max_body_mb: int = Field(default=64, ge=1, le=1024)
    """Megabytes that the body of a request may have; a larger one is refused with status 413."""
    max_header_kb: int = Field(default=64, ge=8, le=1024)
    """Kilobytes that the headers of a request may have; larger ones are refused with status 400."""
    max_connections: int = Field(default=8192, ge=1)
    """Connections at once; a further one is refused with status 429. Half of the files that the process may open is
    the most (`ulimit -Hn`: the limit that programs start with is raised to what is needed)."""
    max_requests_per_key: int = Field(default=1024, ge=1)
    """Requests with the same key that are answered at once; a further one is refused with status 429, after which
    vendors' clients try again."""

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
