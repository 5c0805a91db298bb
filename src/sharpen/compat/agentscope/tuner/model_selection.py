"""The names of `agentscope.tuner.model_selection`: those of `sharpen.model_selection`."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("sharpen.model_selection"), name)
