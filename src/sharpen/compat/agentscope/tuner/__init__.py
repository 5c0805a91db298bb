"""The names of `agentscope.tuner`, with its defaults: `from agentscope.tuner import ...` becomes
`from sharpen.compat.agentscope.tuner import ...`.

In: a name. Out: `sharpen`'s own, but for `tune`, whose runs are in the project `AgentScope` unless they have another.
Every name is loaded on first use: nothing above this room is imported by it.

- `model_selection`: the module of that name
- `prompt_tune`: the module of that name
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = [
    "AlgorithmConfig",
    "DatasetConfig",
    "JudgeOutput",
    "JudgeType",
    "PromptTuneConfig",
    "TinkerConfig",
    "TunerModelConfig",
    "WorkflowOutput",
    "WorkflowType",
    "check_judge_function",
    "check_workflow_function",
    "select_model",
    "tune",
    "tune_prompt",
]
PROJECT = "AgentScope"
"""The project of a run that names none, there."""


def _with_project(tune: Any) -> Any:
    """`sharpen.tune` with AgentScope's default project. A configuration file names its own, or means Trinity-RFT's."""

    @functools.wraps(tune)
    def tune_in_project(*args: Any, **named: Any) -> Any:
        has_file = len(args) > 1 or named.get("config_path") is not None
        if named.get("project_name") is None and not has_file and "project" not in (named.get("settings") or {}):
            named["project_name"] = PROJECT
        return tune(*args, **named)

    return tune_in_project


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("sharpen"), name)
    value = _with_project(value) if name == "tune" else value
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
