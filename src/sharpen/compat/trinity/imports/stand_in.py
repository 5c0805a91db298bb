"""The package `trinity` made of our names, where Trinity-RFT is not installed; and a few names of verl, which it needs.

In: a request to stand in. Out: finders in `sys.meta_path`, so that `from trinity.common.workflows import Workflow`
gives ours. A real Trinity-RFT that is installed is left alone, unless the request says otherwise; a folder `trinity`
that merely lies on the path (a clone of its repository) is not an installation. A real verl is left alone always.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from sharpen.config.functions import load_file, prepare_others
from sharpen.errors import ConfigError, NotIncludedError

_HERE = "sharpen.compat.trinity"


def _from_layer(names: str) -> dict[str, str]:
    """Names that the layer itself has."""
    return {name: f"{_HERE}:{name}" for name in names.split()}


def _from(module: str, names: str) -> dict[str, str]:
    return {name: f"{_HERE}.{module}:{name}" for name in names.split()}


_RECORDS = _from_layer("Experience EID")
_TASKS = _from_layer("Task FormatConfig GenerationConfig")
_MODEL = _from_layer("ModelWrapper")
_BASES = _from_layer("Workflow MultiTurnWorkflow BaseSimpleWorkflow SimpleWorkflow AsyncSimpleWorkflow")
_MATHS = _from_layer("MathWorkflow AsyncMathWorkflow MathBoxedWorkflow AsyncMathBoxedWorkflow")
_STEPS = _from_layer(
    "StepWiseRewardWorkflow AsyncStepWiseRewardWorkflow RewardPropagationWorkflow AsyncRewardPropagationWorkflow"
)
_REWARDS = _from_layer(
    "RewardFn REWARD_FUNCTIONS MathRewardFn MathBoxedRewardFn MathDAPORewardFn AccuracyReward FormatReward "
    "CountDownRewardFn"
)
_LOGS = _from("imports.functions", "get_logger")
_WORKFLOWS = _from_layer("WORKFLOWS")
_USUAL = {**_RECORDS, **_TASKS, **_MODEL, **_BASES, **_LOGS, **_WORKFLOWS, **_REWARDS}
"""What a workflow's module imports itself, so that it can be taken from there too."""
_EVALUATION = _from(
    "imports.functions", "validate_think_pattern find_boxed_answer remove_right_units simple_answer_parser"
)
_GRADING = _from("imports.functions", "grade_answer match_answer")
_FLOWS = "trinity.common.workflows"
_ADVANTAGES = _from("algorithms", "ADVANTAGE_FN AdvantageFn GroupAdvantage")
_LOSSES = _from("algorithms", "POLICY_LOSS_FN PolicyLossFn")
_KLS = _from("algorithms", "KL_FN KLFn")
_ENTROPIES = _from("algorithms", "ENTROPY_LOSS_FN EntropyLossFn")
_STRATEGIES = _from("algorithms", "SAMPLE_STRATEGY SampleStrategy")
_ALGORITHMS = _from("algorithms", "ALGORITHM_TYPE AlgorithmType")

MODULES: Mapping[str, Mapping[str, str]] = {
    "trinity": {},
    "trinity.algorithm": {**_ADVANTAGES, **_LOSSES, **_KLS, **_ENTROPIES, **_STRATEGIES, **_ALGORITHMS},
    "trinity.algorithm.algorithm": _ALGORITHMS,
    "trinity.algorithm.advantage_fn": _ADVANTAGES,
    "trinity.algorithm.advantage_fn.advantage_fn": _ADVANTAGES,
    "trinity.algorithm.policy_loss_fn": _LOSSES,
    "trinity.algorithm.policy_loss_fn.policy_loss_fn": _LOSSES,
    "trinity.algorithm.kl_fn": _KLS,
    "trinity.algorithm.kl_fn.kl_fn": _KLS,
    "trinity.algorithm.entropy_loss_fn": _ENTROPIES,
    "trinity.algorithm.entropy_loss_fn.entropy_loss_fn": _ENTROPIES,
    "trinity.algorithm.sample_strategy": _STRATEGIES,
    "trinity.algorithm.sample_strategy.sample_strategy": _STRATEGIES,
    "trinity.algorithm.utils": _from("algorithms", "aggregate_loss masked_mean"),
    "trinity.common": {},
    "trinity.common.config": _from_layer("FormatConfig GenerationConfig"),
    "trinity.common.constants": _from("imports.functions", "TASKSET_PATH_ENV_VAR PLUGIN_DIRS_ENV_VAR"),
    "trinity.common.experience": _RECORDS,
    "trinity.common.models": _MODEL,
    "trinity.common.models.mm_utils": _from("workflows.pictures", "build_mm_message"),
    "trinity.common.models.model": _MODEL,
    "trinity.common.rewards": _REWARDS,
    "trinity.common.rewards.reward_fn": _REWARDS,
    "trinity.common.rewards.accuracy_reward": _REWARDS,
    "trinity.common.rewards.countdown_reward": _REWARDS,
    "trinity.common.rewards.dapo_reward": _REWARDS,
    "trinity.common.rewards.format_reward": _REWARDS,
    "trinity.common.rewards.math_reward": _REWARDS,
    "trinity.common.rewards.eval_utils": _EVALUATION,
    "trinity.common.rewards.naive_dapo_score": _GRADING,
    "trinity.common.rewards.qwen25_eval": _from("imports.functions", "verify_math_answer extract_answer fix_fracs"),
    "trinity.utils.eval_utils": _EVALUATION,
    _FLOWS: {**_USUAL, **_MATHS, **_STEPS},
    f"{_FLOWS}.workflow": {**_USUAL, **_MATHS},
    f"{_FLOWS}.step_wise_workflow": {**_USUAL, **_STEPS},
    f"{_FLOWS}.customized_math_workflows": {**_USUAL, **_MATHS},
    f"{_FLOWS}.customized_toolcall_workflows": {**_USUAL, **_from("workflows.tool_calls", "ToolCallWorkflow")},
    f"{_FLOWS}.eval_workflow": {**_USUAL, **_from("workflows.maths", "MathEvalWorkflow AsyncMathEvalWorkflow")},
    f"{_FLOWS}.math_rm_workflow": {**_USUAL, **_from("workflows.maths", "MathRMWorkflow AsyncMathRMWorkflow")},
    f"{_FLOWS}.math_ruler_workflow": {
        **_USUAL,
        **_from("workflows.ruler", "MathRULERWorkflow AsyncMathRULERWorkflow"),
    },
    f"{_FLOWS}.rubric_judge_workflow": {
        **_USUAL,
        **_from("workflows.rubric", "RubricJudgeWorkflow RubricJudgeWorkflowWithAPI"),
    },
    f"{_FLOWS}.simple_mm_workflow": {
        **_USUAL,
        **_from("workflows.pictures", "SimpleMMWorkflow AsyncSimpleMMWorkflow"),
    },
    f"{_FLOWS}.on_policy_distill_workflow": {
        **_USUAL,
        **_from("simple", "OnPolicyDistillWorkflow OnPolicyDistillMathWorkflow"),
    },
    f"{_FLOWS}.agentscope": {},
    f"{_FLOWS}.agentscope.react": {},
    f"{_FLOWS}.agentscope.react.react_agent": _from_layer("AgentScopeReActAgent"),
    f"{_FLOWS}.agentscope.react.react_workflow": {**_USUAL, **_from_layer("AgentScopeReActWorkflow")},
    f"{_FLOWS}.envs": {},
    f"{_FLOWS}.envs.agentscope": {},
    f"{_FLOWS}.envs.agentscope.agentscopev0_react_workflow": {
        **_USUAL,
        **_from("workflows.react_math", "AgentScopeV0ReactMathWorkflow"),
    },
    f"{_FLOWS}.envs.agentscope.agentscopev1_react_workflow": {
        **_USUAL,
        **_from("workflows.react_math", "AgentScopeReactMathWorkflow"),
    },
    f"{_FLOWS}.envs.agentscope.agentscopev1_search_workflow": {
        **_USUAL,
        **_from("workflows.web_search", "AgentScopeV1ReactSearchWorkflow"),
    },
    f"{_FLOWS}.envs.email_searcher": {},
    f"{_FLOWS}.envs.email_searcher.react_agent": _from("workflows.email_search", "EmailSearchAgent"),
    f"{_FLOWS}.envs.email_searcher.workflow": {**_USUAL, **_from("workflows.email_search", "EmailSearchWorkflow")},
    f"{_FLOWS}.envs.sudoku": {},
    f"{_FLOWS}.envs.sudoku.sudoku_workflow": {**_USUAL, **_from("workflows.sudoku", "SudokuWorkflow")},
    "trinity.plugins": {},
    "trinity.utils": {},
    "trinity.utils.log": _LOGS,
    "trinity.utils.registry": _from("registry", "Registry"),
    "verl": {},
    "verl.utils": {},
    "verl.utils.py_functional": _from("imports.functions", "timeout_limit"),
    "verl.utils.reward_score": {},
    "verl.utils.reward_score.prime_math": {},
    "verl.utils.reward_score.prime_math.grader": _from("imports.functions", "math_equal"),
}


def modules_with(name: str) -> Sequence[str]:
    """The modules that have a name: first those that are its home in Trinity-RFT, which have the fewest names."""
    return sorted((module for module, names in MODULES.items() if name in names), key=lambda key: len(MODULES[key]))


NAME, DISTRIBUTION, PLUGINS = "trinity", "trinity-rft", "trinity.plugins"
VERL = "verl"


def stand_in(*, shadow: bool = False) -> bool:
    """Let `import trinity` give our names, from now on in this process; whether it does.

    With `shadow` also where Trinity-RFT is installed. Raises `ConfigError` if it has been imported already; without
    `shadow` it is then left alone too.
    """
    if stands_in():
        return True
    real = sys.modules.get(NAME)
    if not shadow and (real is not None or is_installed()):
        return False
    if real is not None:
        where = getattr(real, "__file__", None) or "elsewhere"
        raise ConfigError(
            f"the module {NAME!r} has been imported from {where} already: ours cannot stand in for it any more"
        )
    sys.meta_path.insert(0, Finder(NAME))
    sys.meta_path.append(Finder(VERL))  # the last to be asked
    prepare_others(f"{__name__}:{stand_in_always.__name__}")
    return True


def stand_in_always() -> None:
    """Let `import trinity` give our names in a process that loads code which another one has imported so."""
    stand_in(shadow=True)


def stands_in() -> bool:
    """Whether `import trinity` gives our names."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def is_installed() -> bool:
    """Whether Trinity-RFT is installed."""
    try:
        distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return False
    return True


def load_plugins(folder: Path) -> list[ModuleType]:
    """Load each Python file of a folder but those that begin with `__`, as Trinity-RFT does with its plugins: what they
    register is known then. Raises `ConfigError` for a folder that is not there, and a file that fails."""
    if not folder.is_dir():
        raise ConfigError(f"--plugin-dir {folder}: there is no such folder")
    if stands_in():  # other code may import them as trinity.plugins.<name>
        importlib.import_module(PLUGINS).__path__.append(str(folder))
    return [load_file(path, str(path)) for path in sorted(folder.glob("*.py")) if not path.name.startswith("__")]


class Finder(MetaPathFinder):
    """Finds `trinity` (or `verl`) and the modules below it."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for what we have. Raises `NotIncludedError` for the package's other modules."""
        if name != self.package and not (
            name.startswith(f"{self.package}.") and isinstance(sys.modules.get(self.package), StandIn)
        ):
            return None
        if name in MODULES:
            return ModuleSpec(name, StandInLoader(), is_package=True)
        parent, _, stem = name.rpartition(".")
        for folder in (path or ()) if parent == PLUGINS else ():
            if (file := Path(folder, f"{stem}.py")).is_file():
                return ModuleSpec(name, PluginLoader(file))
        raise NotIncludedError(
            f"{_stands_in_for(name)}, and has no module {name!r}{_near(name, MODULES)}; {_real(name)}"
        )


class StandInLoader(Loader):
    """Makes a module whose names are imported from ours when they are first used."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed: names come when they are asked for."""


class PluginLoader(Loader):
    """Loads a plugin, once, whoever asks for it first."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The plugin, loaded."""
        module = load_file(self.file, str(self.file))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It was loaded under a name of its own, which it keeps."""
        module.__spec__ = self._spec


class StandIn(ModuleType):
    """A module of Trinity-RFT with the names of it that exist here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        known = MODULES[self.__name__]
        if name in known:
            module, _, attribute = known[name].partition(":")
            value = getattr(importlib.import_module(module), attribute)
        elif f"{self.__name__}.{name}" in MODULES:
            value = importlib.import_module(f"{self.__name__}.{name}")
        else:
            raise NotIncludedError(_missing(self.__name__, name, known))
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        below = [key.rpartition(".")[2] for key in MODULES if key.rpartition(".")[0] == self.__name__]
        return sorted({*super().__dir__(), *MODULES[self.__name__], *below})


def _missing(module: str, name: str, known: Any) -> str:
    elsewhere = modules_with(name)
    hint = f"; it is in {elsewhere[0]}" if elsewhere else _near(name, known)
    return f"{_stands_in_for(module)}, and has no {name!r} of {module}{hint}; {_real(module)}"


def _stands_in_for(module: str) -> str:
    return f"sharpen stands in for {'Trinity-RFT' if module.partition('.')[0] == NAME else VERL}"


def _real(module: str) -> str:
    title, package = ("Trinity-RFT", DISTRIBUTION) if module.partition(".")[0] == NAME else (VERL, VERL)
    return f"code that needs it needs {title} itself (pip install {package})"


def _near(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
