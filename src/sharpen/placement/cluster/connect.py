"""Joins a running Ray or starts one here, and reserves a run's resources before anything is loaded.

In: `ClusterConfig`, the bundles of resources that the run's actors need. Out: `Connection` with one placement group for
each role. Raises `ConfigError` with the needed and the available resources, and never waits for resources that do not
exist.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from sharpen.config.extras import install_command
from sharpen.config.functions import PREPARED
from sharpen.config.sections import ClusterConfig
from sharpen.errors import ConfigError

RAY_LINE = "2.60"
"""The supported minor version of Ray."""
REACH_S = 10.0
"""Seconds in which the head node of a cluster must answer."""
RESERVE_S = 30.0
"""Seconds to wait for resources that exist but that others may hold."""

Bundle = Mapping[str, float]
Role = Literal["engine", "trainer rank", "rollout worker"]
_STRATEGIES: Mapping[Role, str] = {"engine": "PACK", "trainer rank": "PACK", "rollout worker": "SPREAD"}


def _install() -> str:
    return f"`{install_command('ray')}` brings ray {RAY_LINE} (docs/use/ray.md)"


def check_ray(installed: str | None = None) -> None:
    """Raise `ConfigError` unless a supported version of Ray is installed. `installed` replaces its version in tests."""
    try:
        found = version("ray") if installed is None else installed
    except PackageNotFoundError:
        raise ConfigError(f"execution is ray, but Ray is not installed: {_install()}") from None
    if not found.startswith(f"{RAY_LINE}."):
        raise ConfigError(f"ray {found} is installed, but execution: ray needs {RAY_LINE}: {_install()}")


class Connection:
    """A connection to a Ray cluster. `owned`: it was started here and ends with the run; a joined one keeps running."""

    def __init__(self, config: ClusterConfig, num_actors: int) -> None:
        """Start or join Ray. One started here gets a CPU for each actor. Raises `ConfigError` if that fails."""
        check_ray()
        import ray

        self.owned = config.ray_address is None and not ray.is_initialized()
        with contextlib.ExitStack() as undo:
            if self.owned:
                _start(config, num_actors)
                undo.callback(ray.shutdown)
            elif ray.is_initialized():  # the user's script has joined a cluster: the run uses that one
                _check_same(config.ray_address)
            else:
                _join(config)
                undo.callback(ray.shutdown)
            self._leave = undo.pop_all()
        self._groups: dict[Role, Any] = {}

    @property
    def line(self) -> str:
        """Whether Ray was started or joined, for the user."""
        return "started here" if self.owned else "joined"

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def reserve(self, needs: Mapping[Role, Sequence[Bundle]]) -> None:
        """Make a placement group for each role. Raises `ConfigError` if the cluster lacks the resources."""
        import ray

        check_size(needs, ray.nodes())
        for role, bundles in needs.items():
            if bundles:
                self._groups[role] = _reserve(role, bundles)

    def options(self, role: Role, index: int, *, share: int = 1) -> dict[str, Any]:
        """Return the options of an actor in the role's bundle `index`. It gets the bundle's resources, or one of
        `share` equal parts of them."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = self._groups[role]
        bundle = group.bundle_specs[index]
        return {
            "num_cpus": bundle.get("CPU", 0) / share,
            "num_gpus": bundle.get("GPU", 0) / share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            **_environment(),
        }

    def close(self) -> None:
        """Release the resources. End a Ray that was started here, leave one that was joined."""
        from ray.util import remove_placement_group

        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        self._leave.close()


def _environment() -> dict[str, Any]:
    """Return the option by which actors know what this process prepared: those of a Ray that was joined do not have its
    environment."""
    calls = os.environ.get(PREPARED)
    return {} if calls is None else {"runtime_env": {"env_vars": {PREPARED: calls}}}


def _start(config: ClusterConfig, num_actors: int) -> None:
    """Start Ray on this machine. Its CPUs are only a count and bind no cores, so it gets as many as the actors need."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, num_actors),
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=config.worker_output,
        )
    except Exception as error:  # Ray raises a bare one if its processes do not answer within 30 seconds
        raise ConfigError(
            f"Ray could not be started on this machine: {_reason(error)}. Start the run again when the machine is less "
            "busy, or start Ray yourself (`ray start --head`) and give cluster.ray_address"
        ) from error


def _join(config: ClusterConfig) -> None:
    import ray

    address = config.ray_address
    assert address is not None
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal() and "/" not in host):
        raise ConfigError(
            f"cluster.ray_address is {address!r}: run on a machine of the cluster and give `auto` or host:port "
            "(Ray's client addresses are not supported)"
        )
    try:
        if address != "auto":  # Ray itself would retry for minutes
            socket.create_connection((host, int(port)), REACH_S).close()
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=config.worker_output)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"cluster.ray_address is {address!r}, but no Ray could be joined there: {_reason(error)}. `ray start "
            "--head` starts one; leave ray_address out to start one on this machine"
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def _check_same(address: str | None) -> None:
    """Raise `ConfigError` if this process has joined a different Ray from the configured one."""
    import ray

    joined = str(ray.get_runtime_context().gcs_address)
    if address not in (None, "auto", joined):
        raise ConfigError(
            f"cluster.ray_address is {address!r}, but this process has joined the Ray at {joined}: leave ray_address "
            "out, or do not call ray.init()"
        )


def check_size(needs: Mapping[Role, Sequence[Bundle]], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` if the whole cluster, or every single machine, has too few resources."""
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    for resource in ("GPU", "CPU"):
        by_role = {role: sum(bundle.get(resource, 0) for bundle in bundles) for role, bundles in needs.items()}
        wanted, there = sum(by_role.values()), sum(machine.get(resource, 0) for machine in machines)
        if wanted > there:
            parts = ", ".join(f"{count:g} for {role}s" for role, count in by_role.items() if count)
            raise ConfigError(
                f"the run needs {wanted:g} {resource}s ({parts}), but the Ray cluster has {there:g} on "
                f"{len(machines)} machine(s): add machines, or ask for less (docs/use/ray.md)"
            )
        largest = max((bundle.get(resource, 0) for bundles in needs.values() for bundle in bundles), default=0)
        if largest > (most := max((machine.get(resource, 0) for machine in machines), default=0)):
            raise ConfigError(
                f"one engine needs {largest:g} {resource}s on one machine (model.tensor_parallel_size), but no machine "
                f"of the Ray cluster has more than {most:g}"
            )


def _reserve(role: Role, bundles: Sequence[Bundle]) -> Any:
    import ray
    from ray.util import placement_group, remove_placement_group

    group = placement_group([dict(bundle) for bundle in bundles], strategy=_STRATEGIES[role])
    if not group.wait(RESERVE_S):
        free = ray.available_resources()
        remove_placement_group(group)
        raise ConfigError(
            f"the Ray cluster could not reserve {len(bundles)} x {dict(bundles[0])} for {role}s within {RESERVE_S:g} "
            f"s: only {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs are free"
        )
    return group
