"""Workflows by name: built in, registered, or where the class is."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharpen.compat.trinity import WORKFLOWS, MathWorkflow, SimpleWorkflow, Workflow
from sharpen.compat.trinity.registry import Registry
from sharpen.errors import ConfigError


class Mine(Workflow):
    def run(self):
        return []


class Other(Workflow):
    def run(self):
        return []


def test_a_class_is_registered_by_a_decorator_or_a_call():
    registry = Registry("workflow", {"math_workflow": "sharpen.compat.trinity.simple:MathWorkflow"})
    assert registry.register_module("mine")(Mine) is Mine
    assert registry.register_module("other", module_cls=Other) is Other
    assert (registry.get("mine"), registry.get("other"), registry.get("math_workflow")) == (Mine, Other, MathWorkflow)
    assert registry.names() == ["math_workflow", "mine", "other"]
    assert "mine" in registry
    assert "yours" not in registry


def test_a_name_is_taken_once():
    registry = Registry("workflow", {"math_workflow": "sharpen.compat.trinity.simple:MathWorkflow"})
    registry.register_module("mine")(Mine)
    registry.register_module("mine")(Mine)
    for name in ("mine", "math_workflow"):
        with pytest.raises(ConfigError, match=f"the workflow '{name}' is registered already, as"):
            registry.register_module(name)(Other)
    registry.register_module("mine", force=True)(Other)
    assert registry.get("mine") is Other
    with pytest.raises(ConfigError, match="registered under a name, got <class"):
        registry.register_module(Mine)  # type: ignore[type-var]


def test_a_file_that_is_loaded_twice_registers_once(tmp_path: Path):
    code = (
        "from sharpen.compat.trinity import WORKFLOWS, Workflow\n"
        "@WORKFLOWS.register_module('twice_loaded')\n"
        "class Twice(Workflow):\n    def run(self):\n        return []\n"
    )
    (tmp_path / "twice_loaded_flow.py").write_text(code)
    first = WORKFLOWS.get(f"{tmp_path / 'twice_loaded_flow.py'}:Twice")
    import twice_loaded_flow  # its folder is importable now

    assert twice_loaded_flow.Twice is not first
    assert WORKFLOWS.get("twice_loaded") is twice_loaded_flow.Twice


def test_where_a_class_is():
    for name in ("sharpen.compat.trinity.simple:SimpleWorkflow", "sharpen.compat.trinity.simple.SimpleWorkflow"):
        assert WORKFLOWS.get(name) is SimpleWorkflow
    with pytest.raises(ConfigError, match="did you mean 'SimpleWorkflow'"):
        WORKFLOWS.get("sharpen.compat.trinity.simple.SimpelWorkflow")
    with pytest.raises(ConfigError, match="one of your own is named"):
        WORKFLOWS.get("nobodys_workflow")
