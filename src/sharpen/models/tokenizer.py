"""Loads a model's tokenizer with its chat template.

In: a model's folder. Out: the tokenizer. Older checkpoints with towers keep the template with their processor
(`chat_template.json`), where transformers' tokenizer does not look.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sharpen.errors import ModelError
from sharpen.models.configuration import reason_of

_PROCESSORS_TEMPLATE = "chat_template.json"


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of the model in `folder`. Raises `ModelError` if it, or its processor's template, cannot be
    read."""
    from transformers import AutoTokenizer  # which takes seconds

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
