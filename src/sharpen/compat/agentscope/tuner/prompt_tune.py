"""The names of `agentscope.tuner.prompt_tune`: those of `sharpen.beyond.prompt_tune`."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("sharpen.beyond.prompt_tune"), name)
