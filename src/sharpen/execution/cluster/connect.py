"""Joins a running Ray or starts one here, and reserves what a run needs of it, before anything is loaded.

In: `ClusterConfig`, the bundles of resources that the run's actors need. Out: `Connection` with one placement group for
each role; or a `ConfigError` that says what was asked for and what there is. Nothing ever waits for resources that do
not exist.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from sharpen.config.cluster import ClusterConfig
from sharpen.config.extras import install_command
from sharpen.errors import ConfigError

RAY_LINE = "2.60"
"""The line of Ray that this is tested with."""
REACH_S = 10.0
"""How long the first machine of a cluster may take to answer."""
RESERVE_S = 30.0
"""How long a reservation may take where the resources exist, but others may hold them."""

Bundle = Mapping[str, float]
Role = Literal["engine", "trainer rank", "rollout worker"]
_STRATEGIES: Mapping[Role, str] = {"engine": "PACK", "trainer rank": "PACK", "rollout worker": "SPREAD"}


def _install() -> str:
    return f"`{install_command('ray')}` brings ray {RAY_LINE} (docs/use/ray.md)"


def check_ray(installed: str | None = None) -> None:
    """Raise `ConfigError` unless the line of Ray that we are tested with is installed (`installed`: its version)."""
    try:
        found = version("ray") if installed is None else installed
    except PackageNotFoundError:
        raise ConfigError(f"execution is ray, but Ray is not installed: {_install()}") from None
    if not found.startswith(f"{RAY_LINE}."):
        raise ConfigError(f"ray {found} is installed, but execution: ray needs {RAY_LINE}: {_install()}")


class Connection:
    """A Ray to place actors in. `owned`: we started it, and end it; one that was joined goes on."""

    def __init__(self, config: ClusterConfig, num_actors: int) -> None:
        """A Ray that is started here has a CPU for each actor. Raises `ConfigError` if Ray cannot be had."""
        check_ray()
        import ray

        self.owned = config.ray_address is None and not ray.is_initialized()
        with contextlib.ExitStack() as undo:
            if self.owned:
                _start(config, num_actors)
                undo.callback(ray.shutdown)
            elif ray.is_initialized():  # the script has joined one: that is where the run goes
                _check_same(config.ray_address)
            else:
                _join(config)
                undo.callback(ray.shutdown)
            self._leave = undo.pop_all()
        self._groups: dict[Role, Any] = {}

    @property
    def line(self) -> str:
        """Whose it is."""
        return "started here" if self.owned else "joined"

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def reserve(self, needs: Mapping[Role, Sequence[Bundle]]) -> None:
        """A placement group for each role. Raises `ConfigError` if the cluster has not got what they ask for."""
        import ray

        check_size(needs, ray.nodes())
        for role, bundles in needs.items():
            if bundles:
                self._groups[role] = _reserve(role, bundles)

    def options(self, role: Role, index: int, *, share: int = 1) -> dict[str, Any]:
        """Options that place an actor into the role's bundle of this index and give it what is reserved there, or one
        of `share` equal parts of it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = self._groups[role]
        bundle = group.bundle_specs[index]
        return {
            "num_cpus": bundle.get("CPU", 0) / share,
            "num_gpus": bundle.get("GPU", 0) / share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }

    def close(self) -> None:
        """Give back what was reserved; end a Ray that we started, leave one that we joined."""
        from ray.util import remove_placement_group

        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        self._leave.close()


def _start(config: ClusterConfig, num_actors: int) -> None:
    """A Ray on this machine. Its CPUs are a count that is kept, not cores that are given: it has as many as needed."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_actors),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=config.worker_output,
    )


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
        if address != "auto":  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), REACH_S).close()
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=config.worker_output)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"cluster.ray_address is {address!r}, but no Ray could be joined there: {reason[:300]}. `ray start --head` "
            "starts one; leave ray_address out to have one on this machine"
        ) from error


def _check_same(address: str | None) -> None:
    """Raise `ConfigError` if this process has joined another Ray than the configured one."""
    import ray

    joined = str(ray.get_runtime_context().gcs_address)
    if address not in (None, "auto", joined):
        raise ConfigError(
            f"cluster.ray_address is {address!r}, but this process has joined the Ray at {joined}: leave ray_address "
            "out, or do not call ray.init()"
        )


def check_size(needs: Mapping[Role, Sequence[Bundle]], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` if the cluster as a whole, or each of its machines, is too small."""
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
            f"s: free are {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs, the rest is in use"
        )
    return group
