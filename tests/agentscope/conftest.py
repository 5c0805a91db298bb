"""Fixtures of the tests with real agents: the gateway over a scripted engine, and rollouts that go through it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from environments import belongs, installed, test_files
from scripted import ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen.compat.agentscope.console import silent_agents
from sharpen.compat.agentscope.model import present
from sharpen.config.run import RolloutConfig
from sharpen.gateway.gateway import Gateway
from sharpen.inference.engine import GenerateRequest
from sharpen.rollout.attempt import UserFunctions
from sharpen.rollout.in_process import InProcess
from sharpen.rollout.models import RolloutModels
from sharpen.rollout.runner import RolloutRunner
from sharpen.rollout.user_loop import owner
from sharpen.types import Group, Task

pytest.register_assert_rewrite("framework_checks", "selection_checks")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks a server for prices
collect_ignore = [name for name in test_files() if not belongs(name, installed())]
THIRD_PARTY = (
    "agentscope",
    "agents",
    "dspy",
    "langchain",
    "langchain_core",
    "langchain_openai",
    "langgraph",
    "litellm",
    "llama_index",
    "pydantic_ai",
    "shortuuid",
)


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, except for deprecations within the packages that are tested, and for what LiteLLM's logging
    has not done when a rollout's loop ends."""
    for package in THIRD_PARTY:
        config.addinivalue_line("filterwarnings", rf"ignore::DeprecationWarning:{package}(\.|$)")
    config.addinivalue_line("filterwarnings", r"ignore:coroutine 'Logging\.:RuntimeWarning")
    config.addinivalue_line(
        "filterwarnings",
        r"ignore:Exception ignored in. <coroutine object Logging\.:pytest.PytestUnraisableExceptionWarning",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here has the marker."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("agentscope")


class Rollouts:
    """Runs a workflow on tasks through runner, sessions and gateway. `engine` is scripted and remembers requests."""

    def __init__(self, gateway: Gateway, engine: ScriptedEngine) -> None:
        self.gateway, self.engine = gateway, engine

    def open(self, rollout_id: str, noise_seed: int) -> RolloutModels:
        return RolloutModels(self.gateway.open(rollout_id, noise_seed), present=present)

    def run(
        self, workflow: Any, judge: Any = None, *, tasks: Any = ({},), group_size: int = 1, **settings: Any
    ) -> list[Group]:
        """`settings` are those of `rollout`."""
        rows = [Task(id=f"train/{i}", index=i, row=row) for i, row in enumerate(tasks)]
        with silent_agents(), self.runner(workflow, judge, group_size, **settings) as runner:
            return runner.run(rows, group_ids=[task.id for task in rows])

    def runner(self, workflow: Any, judge: Any = None, group_size: int = 1, **settings: Any) -> RolloutRunner:
        config = RolloutConfig(**{"timeout_s": 60, "max_attempts": 1, **settings})
        attempts = InProcess(UserFunctions(workflow, judge), config.timeout_s)
        return RolloutRunner(attempts, self.open, config, group_size, 0)


@pytest.fixture(scope="session")
def serving() -> Iterator[ServingLoop]:
    loop = ServingLoop()
    yield loop
    loop.stop()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return toy_tokenizer()


@pytest.fixture
def rollouts(serving: ServingLoop, tokenizer: Any) -> Iterator[Callable[..., Rollouts]]:
    """`rollouts(script)`: the script says what the model samples, from the text of its prompt."""
    gateways: list[Gateway] = []

    def make(script: Callable[[str], str] | str, **options: Any) -> Rollouts:
        def answer(request: GenerateRequest) -> str:
            return script if isinstance(script, str) else script(tokenizer.decode(request.prompt_ids))

        engine = ScriptedEngine(tokenizer, answer, max_model_len=1 << 16)
        options = {"who_calls": owner.get, **options}
        gateways.append(Gateway(engine, tokenizer, model_name="toy", loop=serving.loop, **options))
        return Rollouts(gateways[-1], engine)

    yield make
    for gateway in gateways:
        serving.run(gateway.close())


@pytest.fixture
def agentscope_tuner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """AgentScope 1's tuner package, so that its modules can be imported one by one: its own `__init__` wants DSPy, a
    big package that nothing here uses.
    """
    import agentscope

    package = ModuleType("agentscope.tuner")
    package.__path__ = [str(Path(agentscope.__file__).parent / "tuner")]
    monkeypatch.setitem(sys.modules, "agentscope.tuner", package)
    for name in [name for name in sys.modules if name.startswith("agentscope.tuner.")]:
        monkeypatch.delitem(sys.modules, name)
    return package
