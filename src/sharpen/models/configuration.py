"""Reads the configuration of a model.

In: a model's folder, or its name on the hub. Out: its configuration, as transformers' own classes have it: code in the
folder is never run, and nobody is asked whether it may be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sharpen.config.functions import prepare
from sharpen.errors import ModelError
from sharpen.models.table import bring_type

_CODE = "custom code"
"""What transformers says of a model whose classes are in its folder."""
_UNKNOWN = "but Transformers does not recognize this architecture"
"""What it says of a model whose classes it does not have."""


def read_config(source: str | Path, name: str | None = None) -> Any:
    """Return the configuration of a model. Raises `ModelError`, with `name` (None: that of the source), if it cannot be
    read, or needs code of its own."""
    from transformers import AutoConfig  # which takes seconds

    name = name or str(source)
    _prepare(Path(source))
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{name}: its config.json cannot be read: {reason_of(error)}") from error


def _prepare(folder: Path) -> None:
    """Know the families that the user brings before a model is read: those that the process which started this one
    knows, and that of the model in a folder, if a package announces it."""
    prepare()
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # whatever reads the model says so
    bring_type(str(kind))


def reason_of(error: Exception) -> str:
    """Return in one line why transformers cannot load something."""
    if _CODE in str(error):
        return (
            "it needs code of its own folder (auto_map), which Sharpen does not run; choose a model whose classes "
            "transformers has"
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if _UNKNOWN in reason:
        reason += " If you have classes for it, name their family in `families` (docs/use/extending.md)"
    return reason


# Loads a model's tokenizer with its chat template.
#
# In: a model's folder. Out: the tokenizer. Older checkpoints with towers keep the template with their processor
# (`chat_template.json`), where transformers' tokenizer does not look.

_PROCESSORS_TEMPLATE = "chat_template.json"


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of the model in `folder`. Raises `ModelError` if it, or its processor's template, cannot be
    read."""
    from transformers import AutoTokenizer  # which takes seconds

    _prepare(Path(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library that reads tokenizer.json raises `Exception` itself
        raise ModelError(f"the tokenizer of {folder} cannot be loaded: {reason_of(error)}") from error
    file = Path(folder) / _PROCESSORS_TEMPLATE
    if not getattr(tokenizer, "chat_template", None) and file.is_file():
        try:
            tokenizer.chat_template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{file} holds no chat template: it must be an object with `chat_template`") from error
    return tokenizer
