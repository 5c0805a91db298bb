"""Fixtures of the tests with real vLLM: one engine over the quickstart's model, and the model itself for comparison."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpen.errors import EngineError
from sharpen.placement.engine_choice import installed_builds

HERE = Path(__file__).parent
os.environ.update(RAY_worker_register_timeout_seconds="600", RAY_worker_niceness="0")  # as tests/on_ray has them
# Each of vLLM's engines would compile small helpers of its own for about eight seconds, before its first token, and
# import vLLM in each process (vllm_forked.py). Those that start within `as_for_users` (vllm_served.py) do.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
if installed_builds() and find_spec("torchvision") is None:
    # Its stand-in, also for vLLM's processes, before transformers looks for it.
    sys.path.append(str(HERE / "without_pictures"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), sys.path[-1], str(HERE)]))
collect_ignore = [] if installed_builds() else [path.name for path in HERE.glob("test_*.py")]

if installed_builds():
    from vllm.model_executor.models import registry
    from vllm_forked import fork_processes
    from vllm_served import MODEL, Served, as_for_users, begun, read_model, request, start, vllm_left, weights

    # vLLM looks at a class of models, once for each, in a process that imports all of vLLM, lest it touch a GPU.
    registry._run_in_subprocess = lambda look: look()
    fork_processes()


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, except for those within vLLM and what it brings."""
    for package in ("vllm", "torch", "zmq", "multiprocessing"):
        config.addinivalue_line("filterwarnings", rf"ignore::Warning:{package}(\.|$)")
    context = "ignore:Exception ignored in. <function Context.__del__:pytest.PytestUnraisableExceptionWarning"
    config.addinivalue_line("filterwarnings", "ignore:Unclosed context:ResourceWarning")
    config.addinivalue_line("filterwarnings", context)  # of an engine whose processes died
    warnings.filterwarnings("ignore", "Unclosed context", ResourceWarning)  # if it is collected after the last test


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here has the marker, and more time: several start vLLM more than once."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker("vllm")
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The quickstart's agent."""
    monkeypatch.syspath_prepend(str(MODEL.parent))
    import agent

    yield agent
    del sys.modules["agent"]


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """What an engine leaves to the collector goes while pytest still knows what to ignore of it."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def shared() -> Iterator[Served]:
    """The engine of most tests. At the end a call in flight fails, and no process or file is left."""
    with as_for_users():
        served = start()
    yield served
    folder = served.engine._folder

    async def close() -> None:
        await served.engine._llm.pause_generation(mode="keep")
        (call,) = await begun(served.engine, request([5, 6, 7]))
        await served.engine.close()
        await served.engine.close()
        with pytest.raises(EngineError, match="was closed"):
            await call
        with pytest.raises(EngineError, match="is closed"):
            await served.engine.generate(request([5, 6, 7]))

    assert list(folder.glob("vllm_dist_*")), "what vLLM itself would leave behind goes with the folder"
    served.run(close())
    served.thread.close()
    assert not vllm_left()
    assert not folder.exists()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder for other processes, whose path is short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="at-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def served(shared: Served, model: Any) -> Served:
    """The engine with the model's own weights."""
    shared.run(shared.engine.load(shared.engine.version + 1, weights(model)))
    return shared


@pytest.fixture(scope="session")
def model() -> Any:
    return read_model()


@pytest.fixture(scope="session")
def changed() -> Any:
    """The same model with other weights, far enough away to see."""
    other = read_model()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return other
