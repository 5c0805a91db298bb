"""The formats by the names of `model.tool_call_parser` and `model.reasoning_parser`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from sharpen.errors import ConfigError
from sharpen.gateway.formats.format import ReasoningFormat, ToolFormat
from sharpen.gateway.formats.hermes import HERMES
from sharpen.gateway.formats.think import DEEPSEEK_R1, QWEN3

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

TOOL_FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in (HERMES,)}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {form.name: form for form in (DEEPSEEK_R1, QWEN3)}


def named(formats: Mapping[str, Format], name: str | None, setting: str) -> Format | None:
    """Return the format of this name, None for none. Raises `ConfigError` for a name that is no format's."""
    if name is None:
        return None
    if name not in formats:
        raise ConfigError(f"{setting} is {name!r}; it must be one of {sorted(formats)} or None")
    return formats[name]
