"""The tests that every part passes, ours and yours: whether it keeps what `sharpen.contracts` says.

In: a part, and what it needs to be tried. Out: nothing, or an `AssertionError` that says what is not kept. Each
is a plain function, for any test framework, and is loaded on first use (docs/use/extending.md).

- `algorithms`: advantages, losses, KL terms, aggregations, whole algorithms
- `engines`: engines, against plain forward passes
- `protocols`: client protocols, by requests and answers
- `families`: families of models, by one of their checkpoints
- `formats`: formats of tool calls and of reasoning
- `datasets`: sources of rows
- `environments`: environments
- `monitors`: monitors
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "check_advantage": "sharpen.testing.algorithms",
    "check_aggregation": "sharpen.testing.algorithms",
    "check_algorithm": "sharpen.testing.algorithms",
    "check_dataset": "sharpen.testing.datasets",
    "check_engine": "sharpen.testing.engines",
    "check_environment": "sharpen.testing.environments",
    "check_family": "sharpen.testing.families",
    "check_kl": "sharpen.testing.algorithms",
    "check_monitor": "sharpen.testing.monitors",
    "check_policy_loss": "sharpen.testing.algorithms",
    "check_protocol": "sharpen.testing.protocols",
    "check_reasoning_format": "sharpen.testing.formats",
    "check_tool_format": "sharpen.testing.formats",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from sharpen.testing.algorithms import check_advantage as check_advantage
    from sharpen.testing.algorithms import check_aggregation as check_aggregation
    from sharpen.testing.algorithms import check_algorithm as check_algorithm
    from sharpen.testing.algorithms import check_kl as check_kl
    from sharpen.testing.algorithms import check_policy_loss as check_policy_loss
    from sharpen.testing.datasets import check_dataset as check_dataset
    from sharpen.testing.engines import check_engine as check_engine
    from sharpen.testing.environments import check_environment as check_environment
    from sharpen.testing.families import check_family as check_family
    from sharpen.testing.formats import check_reasoning_format as check_reasoning_format
    from sharpen.testing.formats import check_tool_format as check_tool_format
    from sharpen.testing.monitors import check_monitor as check_monitor
    from sharpen.testing.protocols import check_protocol as check_protocol


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sharpen.testing' has no attribute {name!r}: there are {', '.join(_HOMES)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
