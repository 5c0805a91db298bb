"""Our model object where AgentScope is missing, of an unsupported version, or something else of that name."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sharpen import DatasetConfig, TrinityChatModel, TunerModelConfig, WorkflowOutput, tune
from sharpen.agent.agentscope.model import imported_line, present
from sharpen.errors import ConfigError
from sharpen.gateway.model import ChatModel
from sharpen.placement.auxiliary.endpoint import Endpoint


def chat_model() -> ChatModel:
    """One that serves nobody: only what it is matters here."""
    return ChatModel.__new__(ChatModel)


@pytest.fixture
def agentscope(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name, imported; its version is the test's to set."""
    module = ModuleType("agentscope")
    monkeypatch.setitem(sys.modules, "agentscope", module)
    return module


def test_without_agentscope_it_is_our_own_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "agentscope", raising=False)
    model = chat_model()
    assert present(model) is model
    assert imported_line() is None


def test_something_else_of_that_name_is_not_agentscope(agentscope: ModuleType) -> None:
    model = chat_model()
    assert present(model) is model


@pytest.mark.parametrize("version", ["0.1.6", "1.0.3", "2.0.0", "3.0.0", "unknown"])
def test_an_unsupported_version_is_said(agentscope: Any, version: str) -> None:
    agentscope.__version__ = version
    with pytest.raises(
        ConfigError, match=rf"agentscope {version} is imported, but .*tested: 1\.0\.4, 1\.0\.21"
    ) as raised:
        present(chat_model())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("version", "line"), [("1.0.4", 1), ("1.0.19.post1", 1), ("1.2.0", 1), ("2.0.11", 2)])
def test_supported_versions(agentscope: Any, version: str, line: int) -> None:
    agentscope.__version__ = version
    assert imported_line() == line


def test_tune_says_it_before_anything_is_loaded(agentscope: Any, tmp_path: Any) -> None:
    agentscope.__version__ = "0.1.6"

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(reward=1.0)

    with pytest.raises(ConfigError, match=r"agentscope 0\.1\.6"):
        tune(
            workflow_func=workflow,
            train_dataset=DatasetConfig(path=str(tmp_path / "nowhere")),
            model=TunerModelConfig(model_path=str(tmp_path / "nowhere"), max_model_len=64),
        )


def test_the_name_for_annotations_knows_what_workflows_receive() -> None:
    assert isinstance(chat_model(), TrinityChatModel)
    assert isinstance(Endpoint(base_url="http://nowhere.invalid/v1", name="m", api_key="k"), TrinityChatModel)
    assert not isinstance(SimpleNamespace(client=None), TrinityChatModel)
    with pytest.raises(TypeError, match="do not construct it"):
        TrinityChatModel("model")


def test_calling_our_object_as_agentscopes_agents_do_says_what_to_do() -> None:
    """It happens to a workflow that imports AgentScope inside its function: the first model came before that."""
    with pytest.raises(TypeError, match="import agentscope at the top"):
        chat_model()([{"role": "user", "content": "hello"}])
