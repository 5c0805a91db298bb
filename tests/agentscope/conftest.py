"""Fixtures of the tests with real agents: the gateway over a scripted engine, and rollouts that go through it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from environments import belongs, installed, test_files
from rollout_fixtures import rollouts, serving, tokenizer

__all__ = ["rollouts", "serving", "tokenizer"]
pytest.register_assert_rewrite("framework_checks", "selection_checks", "tracing")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks a server for prices
collect_ignore = [name for name in test_files() if not belongs(name, installed())]
THIRD_PARTY = (
    "agentscope",
    "agents",
    "dspy",
    "langchain",
    "langchain_anthropic",
    "langchain_core",
    "langchain_openai",
    "langgraph",
    "litellm",
    "llama_index",
    "pydantic_ai",
    "shortuuid",
)


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, except for deprecations within the packages that are tested (LlamaIndex has Pydantic's
    name the line that makes an agent), and for what LiteLLM's logging has not done when a rollout's loop ends."""
    for package in THIRD_PARTY:
        config.addinivalue_line("filterwarnings", rf"ignore::DeprecationWarning:{package}(\.|$)")
    config.addinivalue_line("filterwarnings", "ignore::pydantic.warnings.PydanticDeprecationWarning")
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
