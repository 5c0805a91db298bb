"""The formats by the names of `model.tool_call_parser` and `model.reasoning_parser`, and which one a template has.

In: a name, or "auto" with the model's chat template. Out: the format, ours or somebody's own; None for none. vLLM's
names are known too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from sharpen.config.doors import find_part, names
from sharpen.errors import ConfigError
from sharpen.gateway.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from sharpen.gateway.formats.format import DEEPSEEK_R1, QWEN3, ReasoningFormat, ToolFormat
from sharpen.gateway.formats.gemma import FUNCTIONGEMMA, GEMMA4, GEMMA4_THOUGHT
from sharpen.gateway.formats.glm import GLM45
from sharpen.gateway.formats.harmony import HARMONY, HARMONY_ANALYSIS
from sharpen.gateway.formats.hermes import HERMES
from sharpen.gateway.formats.kimi import KIMI_K2
from sharpen.gateway.formats.llama import LLAMA3_JSON
from sharpen.gateway.formats.mistral import MISTRAL, MISTRAL_THINK
from sharpen.gateway.formats.pythonic import PYTHONIC
from sharpen.gateway.formats.qwen3_coder import QWEN3_CODER

AUTO = "auto"
Format = TypeVar("Format", ToolFormat, ReasoningFormat)
GROUPS: Mapping[type, str] = {ToolFormat: "tool_formats", ReasoningFormat: "reasoning_formats"}
"""The kinds of parts, by which formats of somebody's own are found."""

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        *(HARMONY, KIMI_K2, DEEPSEEK_V3, DEEPSEEK_V31, GEMMA4, FUNCTIONGEMMA, MISTRAL),
        *(QWEN3_CODER, GLM45, HERMES, PYTHONIC, LLAMA3_JSON),
    )
}
"""In the order in which a template is searched for their marks: the more special ones first."""
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    form.name: form for form in (HARMONY_ANALYSIS, GEMMA4_THOUGHT, MISTRAL_THINK, DEEPSEEK_R1, QWEN3)
}
"""In the order of the search."""

TOOL_NAMES: Mapping[str, str] = {
    "openai": "harmony",
    "openai_gptoss": "harmony",
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "lfm2": "pythonic",
    "glm47": "glm45",
    "mimo": "qwen3_coder",
}
"""Further names of formats in vLLM."""
REASONING_NAMES: Mapping[str, str] = {
    "openai_gptoss": "harmony",
    "deepseek_v3": "deepseek_r1",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "kimi_k2": "qwen3",
    "mimo": "qwen3",
}
"""Further names of reasoning formats in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """The formats of one model; None for none."""

    tool: ToolFormat | None
    reasoning: ReasoningFormat | None


def formats_of(
    template: str, *, tool_call_parser: str | None, reasoning_parser: str | None, where: str = "model"
) -> Formats:
    """Return the formats that are named; those of the chat template for "auto".

    Raises `ConfigError` for an unknown name; `where` is the section of the two settings.
    """
    return Formats(
        tool=_chosen(ToolFormat, TOOL_FORMATS, TOOL_NAMES, tool_call_parser, template, f"{where}.tool_call_parser"),
        reasoning=_chosen(
            ReasoningFormat, REASONING_FORMATS, REASONING_NAMES, reasoning_parser, template, f"{where}.reasoning_parser"
        ),
    )


def no_format(model_name: str) -> str:
    """Return a warning: tools are offered to a model in whose chat template no format was found."""
    names = ", ".join(sorted(TOOL_FORMATS))
    return (
        f"tools are offered, but the chat template of {model_name} has no known format of tool calls: they stay in the "
        f"text. Name the format that this model writes (model.tool_call_parser: {names}), or set it to null if the "
        "agent reads calls from the text"
    )


def _chosen(
    kind: type[Format],
    formats: Mapping[str, Format],
    further: Mapping[str, str],
    name: str | None,
    template: str,
    setting: str,
) -> Format | None:
    if name is None:
        return None
    if name == AUTO:
        return next((form for form in formats.values() if _has(template, form.marks)), None)
    group = GROUPS[kind]
    name = further.get(name, name)
    if ":" not in name and name not in (known := names(group, formats)):
        raise ConfigError(
            f'{setting} is {name!r}; it must be "auto", None, or one of {sorted(known)}, or a format of your own '
            "(docs/use/extending.md)"
        )
    form = find_part(group, name, formats)
    if not isinstance(form, kind):
        raise ConfigError(
            f"{setting} is {name!r}, which is {form!r}: it must be a {kind.__name__} (docs/use/extending.md)"
        )
    return form


def _has(template: str, marks: tuple[tuple[str, ...], ...]) -> bool:
    return any(all(text in template for text in texts) for texts in marks)
