"""Our names, fields and defaults are those of AgentScope 1.0.21's tuner, compared with the real package."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import agentscope
import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import sharpen
from sharpen.errors import NotIncludedError

NOT_INCLUDED = {"TinkerConfig"}
OWN = {"TunerModelConfig": {"top_k": 0, "min_p": 0.0}, "WorkflowOutput": {"call_rewards": None, "train": None}}
"""Fields that AgentScope's class lacks, with their defaults."""
FOUND = {"tool_call_parser": ("hermes", "auto"), "reasoning_parser": ("deepseek_r1", "auto")}
"""Fields of the model with another default, AgentScope's and ours: the formats are those of the chat template."""
CLASSES = {
    "DatasetConfig": "_dataset",
    "TunerModelConfig": "_model",
    "AlgorithmConfig": "_algorithm",
    "WorkflowOutput": "_workflow",
    "JudgeOutput": "_judge",
}


def theirs(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"agentscope.tuner.{module}"), name)


def fields(model: type[BaseModel]) -> dict[str, Any]:
    """Defaults by field; a required one is `PydanticUndefined`."""
    return {name: field.default for name, field in model.model_fields.items()}


def test_the_version_compared_with() -> None:
    assert agentscope.__version__ == "1.0.21"


def test_every_public_name(agentscope_tuner: ModuleType) -> None:
    source = Path(next(iter(agentscope_tuner.__path__)), "__init__.py").read_text(encoding="utf-8")
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    assert set(names) - set(sharpen.__all__) == NOT_INCLUDED
    for name in names:
        if name in NOT_INCLUDED:
            with pytest.raises(NotIncludedError, match=f"{name} is not part of Sharpen"):
                getattr(sharpen, name)
        else:
            assert getattr(sharpen, name) is not None


@pytest.mark.parametrize("name", CLASSES)
def test_fields_and_defaults(agentscope_tuner: ModuleType, name: str) -> None:
    expected = fields(theirs(CLASSES[name], name))
    if name == "TunerModelConfig":
        assert expected.pop("tinker_config") is None  # taken as None only, see tests/config
    ours = fields(getattr(sharpen, name))
    for field in FOUND.keys() & ours.keys():
        assert (expected.pop(field), ours.pop(field)) == FOUND[field]
    assert {field: ours.pop(field) for field in OWN.get(name, ())} == OWN.get(name, {})
    assert ours == expected


@pytest.mark.parametrize(
    ("name", "annotations"),
    [
        ("DatasetConfig", {}),
        ("TunerModelConfig", {"tool_call_parser": str | None, "reasoning_parser": str | None}),
        ("AlgorithmConfig", {}),
        ("WorkflowOutput", {"metrics": dict[str, Any] | None}),
        ("JudgeOutput", {"metrics": dict[str, Any] | None}),
    ],
)
def test_types_of_the_fields(agentscope_tuner: ModuleType, name: str, annotations: dict[str, Any]) -> None:
    """The same, or wider where `annotations` says so."""
    ours, expected = getattr(sharpen, name).model_fields, theirs(CLASSES[name], name).model_fields
    shared = ours.keys() - OWN.get(name, {}).keys()
    wider = {field for field in shared if ours[field].annotation != expected[field].annotation}
    assert wider == set(annotations)
    assert {field: ours[field].annotation for field in annotations} == annotations


def test_required_fields_are_required(agentscope_tuner: ModuleType) -> None:
    required = [name for name, default in fields(sharpen.TunerModelConfig).items() if default is PydanticUndefined]
    assert required == ["model_path", "max_model_len"]


def test_the_arguments_of_tune(agentscope_tuner: ModuleType) -> None:
    expected = inspect.signature(theirs("_tune", "tune")).parameters
    ours = inspect.signature(sharpen.tune).parameters
    assert set(ours) - set(expected) == {"settings", "environment", "judge_floor"}
    assert ours["workflow_func"].default is None  # required there; here supervised algorithms need no workflow
    shared = set(expected) - {"workflow_func"}
    assert {name: expected[name].default for name in shared} == {name: ours[name].default for name in shared}
    assert list(ours)[:2] == ["workflow_func", "config_path"]  # the oldest form gives these by position


def test_what_their_check_takes_ours_takes(agentscope_tuner: ModuleType) -> None:
    """Ours takes more: a parameter that nobody passes may have a default."""

    async def workflow(task: Any, model: Any, auxiliary_models: Any, logger: Any) -> None: ...
    async def judge(task: Any, response: Any, auxiliary_models: Any = None) -> None: ...
    async def extra(task: Any, model: Any, response: Any, tools: Any = None) -> None: ...
    async def unknown(task: Any, model: Any, response: Any, tools: Any) -> None: ...

    config = importlib.import_module("agentscope.tuner._config")
    for module in (config, sharpen):
        module.check_workflow_function(workflow)
        module.check_judge_function(judge)
        for check in (module.check_workflow_function, module.check_judge_function):
            with pytest.raises(ValueError, match=r"tools|response|disallowed"):
                check(unknown)
    with pytest.raises(ValueError, match="disallowed"):
        config.check_judge_function(extra)


def test_the_tuners_names_are_all_there() -> None:
    """Red where AgentScope's tuner has a name that an import line would miss."""
    from sharpen.compat.agentscope import tuner as ours

    tree = ast.parse((Path(agentscope.__file__).parent / "tuner" / "__init__.py").read_text())
    (theirs,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(ours.__all__) == sorted(theirs)
