"""AgentTune: reinforcement learning for the model inside your agent.

`import agenttune` is light: every public name is loaded on first use, and torch only when training starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "tune": "agenttune.tuning",
    "TuneResult": "agenttune.result",
    "DatasetConfig": "agenttune.config.public",
    "TunerModelConfig": "agenttune.config.public",
    "AlgorithmConfig": "agenttune.config.public",
    "AuxiliaryModelConfig": "agenttune.config.run",
    "WorkflowOutput": "agenttune.config.public",
    "JudgeOutput": "agenttune.config.public",
    "WorkflowType": "agenttune.config.public",
    "JudgeType": "agenttune.config.public",
    "check_workflow_function": "agenttune.rollout.signature",
    "check_judge_function": "agenttune.rollout.signature",
    "Dataset": "agenttune.config.public",
    "TunerChatModel": "agenttune.config.public",
    "Algorithm": "agenttune.config.public",
    "TrinityChatModel": "agenttune.compat.agentscope",
    "AgentTuneError": "agenttune.errors",
    "UnusableAnswerError": "agenttune.errors",
}

_NOT_INCLUDED = {
    "tune_prompt": "it tunes prompts, AgentTune tunes weights",
    "PromptTuneConfig": "it tunes prompts, AgentTune tunes weights",
    "select_model": "it compares models of others, AgentTune tunes one",
    "TinkerConfig": "it configures a hosted service, AgentTune trains on your own machine",
}
"""Names of AgentScope's tuner that are not part of AgentTune, and why."""

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from agenttune.compat.agentscope import TrinityChatModel as TrinityChatModel
    from agenttune.config.public import Algorithm as Algorithm
    from agenttune.config.public import AlgorithmConfig as AlgorithmConfig
    from agenttune.config.public import Dataset as Dataset
    from agenttune.config.public import DatasetConfig as DatasetConfig
    from agenttune.config.public import JudgeOutput as JudgeOutput
    from agenttune.config.public import JudgeType as JudgeType
    from agenttune.config.public import TunerChatModel as TunerChatModel
    from agenttune.config.public import TunerModelConfig as TunerModelConfig
    from agenttune.config.public import WorkflowOutput as WorkflowOutput
    from agenttune.config.public import WorkflowType as WorkflowType
    from agenttune.config.run import AuxiliaryModelConfig as AuxiliaryModelConfig
    from agenttune.errors import AgentTuneError as AgentTuneError
    from agenttune.errors import UnusableAnswerError as UnusableAnswerError
    from agenttune.result import TuneResult as TuneResult
    from agenttune.rollout.signature import check_judge_function as check_judge_function
    from agenttune.rollout.signature import check_workflow_function as check_workflow_function
    from agenttune.tuning import tune as tune


def __getattr__(name: str) -> Any:
    if name in _NOT_INCLUDED:
        from agenttune.errors import NotIncludedError

        raise NotIncludedError(
            f"{name} is not part of AgentTune: {_NOT_INCLUDED[name]}. AgentScope 1.0 has it in agentscope.tuner",
            name=__name__,
        )
    if name not in _HOMES:
        raise AttributeError(f"module 'agenttune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
