"""Sharpen: reinforcement learning for the model inside your agent.

`import sharpen` is fast: public names are loaded on first use, and torch only when training starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "tune": "sharpen.tuning",
    "TuneResult": "sharpen.run.result",
    "DatasetConfig": "sharpen.config.public",
    "EnvironmentConfig": "sharpen.config.public",
    "TunerModelConfig": "sharpen.config.public",
    "AlgorithmConfig": "sharpen.config.public",
    "AuxiliaryModelConfig": "sharpen.config.run",
    "JudgeFloorConfig": "sharpen.config.run",
    "WorkflowOutput": "sharpen.config.public",
    "JudgeOutput": "sharpen.config.public",
    "WorkflowType": "sharpen.config.public",
    "JudgeType": "sharpen.config.public",
    "check_workflow_function": "sharpen.agent.rollout.signature",
    "check_judge_function": "sharpen.agent.rollout.signature",
    "select_model": "sharpen.beyond.model_selection.select",
    "avg_time_judge": "sharpen.beyond.model_selection.select",
    "avg_token_consumption_judge": "sharpen.beyond.model_selection.select",
    "tune_prompt": "sharpen.beyond.prompt_tune.tuning",
    "PromptTuneConfig": "sharpen.beyond.prompt_tune.settings",
    "drop": "sharpen.agent.operators.rollouts",
    "with_reward": "sharpen.agent.operators.rollouts",
    "RubricJudge": "sharpen.agent.judges.rubric",
    "Criterion": "sharpen.agent.judges.rubric",
    "PairwiseJudge": "sharpen.agent.judges.compare",
    "RelativeJudge": "sharpen.agent.judges.compare",
    "SeveralJudges": "sharpen.agent.judges.several",
    "WatchedJudge": "sharpen.agent.judges.several",
    "JudgeModel": "sharpen.agent.judges.model",
    "Dataset": "sharpen.config.public",
    "TunerChatModel": "sharpen.config.public",
    "Algorithm": "sharpen.config.public",
    "TrinityChatModel": "sharpen.agent.agentscope.model",
    "SharpenError": "sharpen.errors",
    "UnusableAnswerError": "sharpen.errors",
}

_NOT_INCLUDED = {
    "TinkerConfig": "it configures a hosted service, Sharpen trains on your own machine",
}
"""Names of AgentScope's tuner that are not part of Sharpen, with the reason."""

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from sharpen.agent.agentscope.model import TrinityChatModel as TrinityChatModel
    from sharpen.agent.judges.compare import PairwiseJudge as PairwiseJudge
    from sharpen.agent.judges.compare import RelativeJudge as RelativeJudge
    from sharpen.agent.judges.model import JudgeModel as JudgeModel
    from sharpen.agent.judges.rubric import Criterion as Criterion
    from sharpen.agent.judges.rubric import RubricJudge as RubricJudge
    from sharpen.agent.judges.several import SeveralJudges as SeveralJudges
    from sharpen.agent.judges.several import WatchedJudge as WatchedJudge
    from sharpen.agent.operators.rollouts import drop as drop
    from sharpen.agent.operators.rollouts import with_reward as with_reward
    from sharpen.agent.rollout.signature import check_judge_function as check_judge_function
    from sharpen.agent.rollout.signature import check_workflow_function as check_workflow_function
    from sharpen.beyond.model_selection.select import avg_time_judge as avg_time_judge
    from sharpen.beyond.model_selection.select import avg_token_consumption_judge as avg_token_consumption_judge
    from sharpen.beyond.model_selection.select import select_model as select_model
    from sharpen.beyond.prompt_tune.settings import PromptTuneConfig as PromptTuneConfig
    from sharpen.beyond.prompt_tune.tuning import tune_prompt as tune_prompt
    from sharpen.config.public import Algorithm as Algorithm
    from sharpen.config.public import AlgorithmConfig as AlgorithmConfig
    from sharpen.config.public import Dataset as Dataset
    from sharpen.config.public import DatasetConfig as DatasetConfig
    from sharpen.config.public import EnvironmentConfig as EnvironmentConfig
    from sharpen.config.public import JudgeOutput as JudgeOutput
    from sharpen.config.public import JudgeType as JudgeType
    from sharpen.config.public import TunerChatModel as TunerChatModel
    from sharpen.config.public import TunerModelConfig as TunerModelConfig
    from sharpen.config.public import WorkflowOutput as WorkflowOutput
    from sharpen.config.public import WorkflowType as WorkflowType
    from sharpen.config.run import AuxiliaryModelConfig as AuxiliaryModelConfig
    from sharpen.config.run import JudgeFloorConfig as JudgeFloorConfig
    from sharpen.errors import SharpenError as SharpenError
    from sharpen.errors import UnusableAnswerError as UnusableAnswerError
    from sharpen.run.result import TuneResult as TuneResult
    from sharpen.tuning import tune as tune


def __getattr__(name: str) -> Any:
    if name in _NOT_INCLUDED:
        from sharpen.errors import NotIncludedError

        raise NotIncludedError(
            f"{name} is not part of Sharpen: {_NOT_INCLUDED[name]}. AgentScope 1.0 has it in agentscope.tuner",
            name=__name__,
        )
    if name not in _HOMES:
        raise AttributeError(f"module 'sharpen' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
