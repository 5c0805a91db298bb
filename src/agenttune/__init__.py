"""AgentTune: reinforcement learning for the model inside your agent.

`import agenttune` is light: every public name is loaded on first use, and torch only when training starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "tune": "agenttune.tuning",
    "TuneResult": "agenttune.tuning",
    "DatasetConfig": "agenttune.config.public",
    "TunerModelConfig": "agenttune.config.public",
    "AlgorithmConfig": "agenttune.config.public",
    "WorkflowOutput": "agenttune.config.public",
    "JudgeOutput": "agenttune.config.public",
    "AgentTuneError": "agenttune.errors",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from agenttune.config.public import AlgorithmConfig as AlgorithmConfig
    from agenttune.config.public import DatasetConfig as DatasetConfig
    from agenttune.config.public import JudgeOutput as JudgeOutput
    from agenttune.config.public import TunerModelConfig as TunerModelConfig
    from agenttune.config.public import WorkflowOutput as WorkflowOutput
    from agenttune.errors import AgentTuneError as AgentTuneError
    from agenttune.tuning import TuneResult as TuneResult
    from agenttune.tuning import tune as tune


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agenttune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
