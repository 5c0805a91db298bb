"""Fixtures of the tests with real Ray: one cluster for all of them, parts that are closed after each module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HAS_RAY = find_spec("ray") is not None
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.update(RAY_worker_register_timeout_seconds="600")  # Ray starts a process again that takes longer to begin
os.environ.update(RAY_worker_niceness="0")  # with Ray's own 15, actors starve beside another suite
collect_ignore = [] if HAS_RAY else [path.name for path in HERE.glob("test_*.py")]


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, except for those within Ray."""
    config.addinivalue_line("filterwarnings", r"ignore::Warning:ray(\.|$)")
    config.addinivalue_line("filterwarnings", "ignore:Tip. In future versions of Ray:FutureWarning")
    config.addinivalue_line("filterwarnings", "ignore:subprocess .* is still running:ResourceWarning")
    config.addinivalue_line("filterwarnings", "ignore:unclosed file .*ray:ResourceWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here has the marker, and time for the processes that it starts on a machine that is busy."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker("ray")
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray of one node with 10 CPUs by its own account; tests may add nodes. Runs join it."""
    import logging

    import ray
    from ray.cluster_utils import Cluster

    for attempts_left in (2, 1, 0):
        try:
            made = Cluster(initialize_head=True, head_node_args={"num_cpus": 10, "object_store_memory": 200 * 2**20})
            break
        except Exception:  # Ray gives a node 30 s to start: a busy machine may need longer
            if not attempts_left:
                raise
    ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def make_serving(cluster: Any, toy_model_dir: Path) -> Iterator[Callable[..., Any]]:
    """`RayServing` over the toy model, closed at the end; keyword arguments are settings, with `__` for the dot."""
    from sharpen.config.load import resolve
    from sharpen.placement.cluster.serving import RayServing
    from sharpen.run.decide import decide_evaluation

    made: list[RayServing] = []

    def make(workflow: Any, *, grace_s: float = 10.0, **settings: Any) -> RayServing:
        tree = {
            "train_dataset.path": "none",
            "model": {"model_path": str(toy_model_dir), "max_model_len": 128, "max_tokens": 8},
            "algorithm.group_size": 2,
            "execution": "ray",
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        job = decide_evaluation(resolve(settings=tree).config, workflow, None)
        made.append(RayServing(job, grace_s=grace_s))
        return made[-1]

    yield make
    for serving in made:
        serving.close()
