"""Reads the configuration of a model.

In: a model's folder, or its name on the hub. Out: its configuration, as transformers' own classes have it: code in the
folder is never run, and nobody is asked whether it may be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sharpen.errors import ModelError

_CODE = "custom code"
"""What transformers says of a model whose classes are in its folder."""


def read_config(source: str | Path, name: str | None = None) -> Any:
    """Return the configuration of a model. Raises `ModelError`, with `name` (None: that of the source), if it cannot be
    read, or needs code of its own."""
    from transformers import AutoConfig  # which takes seconds

    name = name or str(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{name}: its config.json cannot be read: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Return in one line why transformers cannot load something."""
    if _CODE in str(error):
        return (
            "it needs code of its own folder (auto_map), which Sharpen does not run; choose a model whose classes "
            "transformers has"
        )
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
