"""Workflows and reward functions by the names that Trinity's users give them.

In: a name (built in, or registered by the user's code) or where a class is. Out: the class, or a `ConfigError`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, overload

from sharpen.config.functions import import_function
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError

C = TypeVar("C", bound=Callable[..., Any])


class Registry:
    """Classes by name. `built_in` says where ours are (`module:Class`); they are imported when asked for."""

    def __init__(self, kind: str, built_in: Mapping[str, str]) -> None:
        self.kind = kind
        self.built_in: Mapping[str, str] = dict(built_in)
        self._registered: dict[str, Callable[..., Any]] = {}

    @overload
    def register_module(self, module_name: str, module_cls: None = None, force: bool = False) -> Callable[[C], C]: ...
    @overload
    def register_module(self, module_name: str, module_cls: C, force: bool = False) -> C: ...
    def register_module(
        self, module_name: str, module_cls: C | None = None, force: bool = False
    ) -> C | Callable[[C], C]:
        """Register a class under a name; without a class, a decorator that does.

        Raises `ConfigError` if the name is taken, unless `force` is set (or the same file is loaded again).
        """
        if not isinstance(module_name, str) or not module_name:
            raise ConfigError(f"a {self.kind} is registered under a name, got {module_name!r}")
        if module_cls is None:
            return lambda found: self._register(module_name, found, force=force)
        return self._register(module_name, module_cls, force=force)

    def get(self, name: str) -> Callable[..., Any]:
        """The class of that name, or that `module:Class`, `path/file.py:Class` or `module.Class` says.

        Raises `ConfigError`, with the nearest name, if there is none.
        """
        if name in self._registered:
            return self._registered[name]
        if name in self.built_in:
            return import_function(self.built_in[name])
        if ":" in name:
            return import_function(name)
        module, dot, attribute = name.rpartition(".")
        if dot:
            return import_function(f"{module}:{attribute}")
        raise self._unknown(name)

    def check(self, name: str) -> None:
        """Raise `ConfigError` for a name that nothing is registered under. Where a class is, nothing is imported."""
        if not (name in self or ":" in name or "." in name):
            raise self._unknown(name)

    def _unknown(self, name: str) -> ConfigError:
        near = get_close_matches(name, self.names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return ConfigError(
            f"there is no {self.kind} {name!r}{hint} (there are {', '.join(self.names())}; one of your own is named "
            "'package.module:Class' or 'path/file.py:Class')"
        )

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self.built_in, *self._registered})

    def __contains__(self, name: object) -> bool:
        return name in self._registered or name in self.built_in

    def _register(self, name: str, found: C, *, force: bool) -> C:
        taken = self._registered.get(name) or (self.get(name) if name in self.built_in else None)
        if taken is not None and not force and _origin(taken) != _origin(found):
            raise ConfigError(
                f"the {self.kind} {name!r} is registered already, as {_origin(taken)[1]} of {_origin(taken)[0]}: "
                "choose another name, or pass force=True"
            )
        self._registered[name] = found
        return found


def _origin(found: Callable[..., Any]) -> tuple[str, str]:
    """The file and the qualified name of a class, which stay the same where its file is loaded a second time."""
    file = getattr(sys.modules.get(found.__module__), "__file__", None)
    return str(file or found.__module__), found.__qualname__


_HERE = "sharpen.compat.trinity"

WORKFLOWS = Registry(
    "workflow",
    {
        "simple_workflow": f"{_HERE}.simple:SimpleWorkflow",
        "async_simple_workflow": f"{_HERE}.simple:AsyncSimpleWorkflow",
        "math_workflow": f"{_HERE}.simple:MathWorkflow",
        "async_math_workflow": f"{_HERE}.simple:AsyncMathWorkflow",
        "math_boxed_workflow": f"{_HERE}.simple:MathBoxedWorkflow",
        "async_math_boxed_workflow": f"{_HERE}.simple:AsyncMathBoxedWorkflow",
        "math_eval_workflow": f"{_HERE}.workflows.maths:MathEvalWorkflow",
        "async_math_eval_workflow": f"{_HERE}.workflows.maths:AsyncMathEvalWorkflow",
        "math_rm_workflow": f"{_HERE}.workflows.maths:MathRMWorkflow",
        "async_math_rm_workflow": f"{_HERE}.workflows.maths:AsyncMathRMWorkflow",
        "tool_call_workflow": f"{_HERE}.workflows.tool_calls:ToolCallWorkflow",
        "toolcall_workflow": f"{_HERE}.workflows.tool_calls:ToolCallWorkflow",
        "math_ruler_workflow": f"{_HERE}.workflows.ruler:MathRULERWorkflow",
        "async_math_ruler_workflow": f"{_HERE}.workflows.ruler:AsyncMathRULERWorkflow",
        "rubric_judge_workflow": f"{_HERE}.workflows.rubric:RubricJudgeWorkflow",
        "rubric_judge_openai_workflow": f"{_HERE}.workflows.rubric:RubricJudgeWorkflowWithAPI",
        "sudoku_workflow": f"{_HERE}.workflows.sudoku:SudokuWorkflow",
        "agentscope_react_workflow": f"{_HERE}.react:AgentScopeReActWorkflow",
        "as_react_workflow": f"{_HERE}.react:AgentScopeReActWorkflow",
        "on_policy_distill_workflow": f"{_HERE}.distillation:OnPolicyDistillWorkflow",
        "on_policy_distill_math_workflow": f"{_HERE}.distillation:OnPolicyDistillMathWorkflow",
    },
)

REWARD_FUNCTIONS = Registry(
    "reward function",
    {
        "math_reward": f"{_HERE}.rewards:MathRewardFn",
        "math_boxed_reward": f"{_HERE}.rewards:MathBoxedRewardFn",
        "math_dapo_reward": f"{_HERE}.dapo:MathDAPORewardFn",
        "accuracy_reward": f"{_HERE}.rewards:AccuracyReward",
        "format_reward": f"{_HERE}.rewards:FormatReward",
        "countdown_reward": f"{_HERE}.rewards:CountDownRewardFn",
    },
)


def check_names(config: RunConfig) -> None:
    """Raise `ConfigError` for a workflow or a reward function of a name that does not exist. Imports no user's code."""
    if config.workflow is not None:
        WORKFLOWS.check(config.workflow)
    for arguments in (config.task_args, *(own.task_args or {} for own in config.evaluation.own.values())):
        if isinstance(name := arguments.get("reward_fn"), str):
            REWARD_FUNCTIONS.check(name)
    for own in config.evaluation.own.values():
        if own.workflow is not None:
            WORKFLOWS.check(own.workflow)
