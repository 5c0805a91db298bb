"""Trinity-RFT's workflow layer and configuration files.

Workflow classes written for Trinity run here with their imports changed to `from sharpen.compat.trinity import ...`.
Every name is loaded on first use; none of them loads torch.

- `workflow`: `Workflow`, which users extend, and that of several turns
- `task`: `Task`: what a workflow is given to do
- `model`: `ModelWrapper`: what it talks to
- `experience`: `Experience`: what it returns
- `adapter`: runs such a class as one of our workflows
- `results`: what it returned as rewards of rollouts
- `registry`: workflows and reward functions by name, and the packages that some need
- `algorithms`: advantages, losses and more that plugins register, as parts of ours
- `simple`: workflows of one call
- `steps`: workflows of many steps
- `react`: AgentScope's agent as a workflow
- `workflows/`: the other built-in ones
- `rewards`: the built-in reward functions
- `equality`: whether two expressions say the same
- `equality_process`: the process that compares them, which may be ended
- `rm_gallery`: a reward function of the package rm-gallery
- `yaml/`: its configuration files
- `imports/`: `import trinity` without it
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HERE = "sharpen.compat.trinity"
_HOMES = {
    "Experience": "experience",
    "EID": "experience",
    "Task": "task",
    "FormatConfig": "task",
    "GenerationConfig": "task",
    "ModelWrapper": "model",
    "Workflow": "workflow",
    "MultiTurnWorkflow": "workflow",
    "BaseSimpleWorkflow": "simple",
    "SimpleWorkflow": "simple",
    "AsyncSimpleWorkflow": "simple",
    "MathWorkflow": "simple",
    "AsyncMathWorkflow": "simple",
    "MathBoxedWorkflow": "simple",
    "AsyncMathBoxedWorkflow": "simple",
    "StepWiseRewardWorkflow": "steps",
    "AsyncStepWiseRewardWorkflow": "steps",
    "RewardPropagationWorkflow": "steps",
    "AsyncRewardPropagationWorkflow": "steps",
    "AgentScopeReActAgent": "react",
    "AgentScopeReActWorkflow": "react",
    "WORKFLOWS": "registry",
    "REWARD_FUNCTIONS": "registry",
    "RewardFn": "rewards",
    "MathBoxedRewardFn": "rewards",
    "MathRewardFn": "rewards",
    "AccuracyReward": "rewards",
    "FormatReward": "rewards",
    "CountDownRewardFn": "rewards",
    "MathDAPORewardFn": "rewards",
    "stand_in": "imports.stand_in",
    "load_plugins": "imports.stand_in",
    "workflow_function": "adapter",
    "configured_workflow": "adapter",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from sharpen.compat.trinity.adapter import configured_workflow as configured_workflow
    from sharpen.compat.trinity.adapter import workflow_function as workflow_function
    from sharpen.compat.trinity.experience import EID as EID
    from sharpen.compat.trinity.experience import Experience as Experience
    from sharpen.compat.trinity.imports.stand_in import load_plugins as load_plugins
    from sharpen.compat.trinity.imports.stand_in import stand_in as stand_in
    from sharpen.compat.trinity.model import ModelWrapper as ModelWrapper
    from sharpen.compat.trinity.react import AgentScopeReActAgent as AgentScopeReActAgent
    from sharpen.compat.trinity.react import AgentScopeReActWorkflow as AgentScopeReActWorkflow
    from sharpen.compat.trinity.registry import REWARD_FUNCTIONS as REWARD_FUNCTIONS
    from sharpen.compat.trinity.registry import WORKFLOWS as WORKFLOWS
    from sharpen.compat.trinity.rewards import AccuracyReward as AccuracyReward
    from sharpen.compat.trinity.rewards import CountDownRewardFn as CountDownRewardFn
    from sharpen.compat.trinity.rewards import FormatReward as FormatReward
    from sharpen.compat.trinity.rewards import MathBoxedRewardFn as MathBoxedRewardFn
    from sharpen.compat.trinity.rewards import MathDAPORewardFn as MathDAPORewardFn
    from sharpen.compat.trinity.rewards import MathRewardFn as MathRewardFn
    from sharpen.compat.trinity.rewards import RewardFn as RewardFn
    from sharpen.compat.trinity.simple import AsyncMathBoxedWorkflow as AsyncMathBoxedWorkflow
    from sharpen.compat.trinity.simple import AsyncMathWorkflow as AsyncMathWorkflow
    from sharpen.compat.trinity.simple import AsyncSimpleWorkflow as AsyncSimpleWorkflow
    from sharpen.compat.trinity.simple import BaseSimpleWorkflow as BaseSimpleWorkflow
    from sharpen.compat.trinity.simple import MathBoxedWorkflow as MathBoxedWorkflow
    from sharpen.compat.trinity.simple import MathWorkflow as MathWorkflow
    from sharpen.compat.trinity.simple import SimpleWorkflow as SimpleWorkflow
    from sharpen.compat.trinity.steps import AsyncRewardPropagationWorkflow as AsyncRewardPropagationWorkflow
    from sharpen.compat.trinity.steps import AsyncStepWiseRewardWorkflow as AsyncStepWiseRewardWorkflow
    from sharpen.compat.trinity.steps import RewardPropagationWorkflow as RewardPropagationWorkflow
    from sharpen.compat.trinity.steps import StepWiseRewardWorkflow as StepWiseRewardWorkflow
    from sharpen.compat.trinity.task import FormatConfig as FormatConfig
    from sharpen.compat.trinity.task import GenerationConfig as GenerationConfig
    from sharpen.compat.trinity.task import Task as Task
    from sharpen.compat.trinity.workflow import MultiTurnWorkflow as MultiTurnWorkflow
    from sharpen.compat.trinity.workflow import Workflow as Workflow


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {_HERE!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{_HERE}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
