"""The names of `agentscope.tuner.model_selection`: those of `sharpen`."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("sharpen.beyond.model_selection"), name)
