"""The formats in which a model writes tool calls and reasoning, from its files: before a tokenizer is loaded.

In: a model's settings and its folder. Out: its formats, and the line that says which they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sharpen.config.public import TunerModelConfig
from sharpen.errors import ModelError
from sharpen.gateway.formats.table import AUTO, Formats, formats_of
from sharpen.gateway.render import template_text


def check_formats(model: TunerModelConfig, where: str = "model") -> None:
    """Raise `ConfigError` for a name that is no format's. `where` is the section of the model's settings."""
    formats_of("", tool_call_parser=model.tool_call_parser, reasoning_parser=model.reasoning_parser, where=where)


def model_formats(model: TunerModelConfig, folder: Path) -> Formats:
    """Return the formats of a model: those that are named, or those of its chat template. Raises `ConfigError` for an
    unknown name, `ModelError` for files that cannot be read."""
    return formats_of(
        read_template(folder), tool_call_parser=model.tool_call_parser, reasoning_parser=model.reasoning_parser
    )


def formats_line(model: TunerModelConfig, folder: Path) -> str:
    """Say which formats a model has, and where they come from. Raises what `model_formats` raises."""
    formats = model_formats(model, folder)
    tool = _origin("none" if formats.tool is None else formats.tool.name, model.tool_call_parser)
    reasoning = _origin("none" if formats.reasoning is None else formats.reasoning.name, model.reasoning_parser)
    return f"formats of {model.model_path}: tool calls {tool}, reasoning {reasoning}"


def _origin(name: str, setting: str | None) -> str:
    if setting != AUTO:
        return f"{name} (as set)"
    return (
        f"{name} (no known format in the chat template)" if name == "none" else f"{name} (found in the chat template)"
    )


def local_formats(model: TunerModelConfig) -> tuple[str, ...]:
    """Return the line of `formats_line` if the model's files are here, and nothing needs to be downloaded."""
    folder = Path(model.model_path).expanduser()
    return (formats_line(model, folder),) if folder.is_dir() else ()


def serve_options(formats: Formats) -> str:
    """Return the options with which `vllm serve` reads the same, as far as it has these formats, each after a space."""
    tool, reasoning = ("" if one is None else one.vllm for one in (formats.tool, formats.reasoning))
    options = f" --enable-auto-tool-choice --tool-call-parser {tool}" if tool else ""
    return options + (f" --reasoning-parser {reasoning}" if reasoning else "")


def read_template(folder: Path) -> str:
    """Return the text of a model's chat template, empty if it has none. Raises `ModelError`."""
    files = [*sorted(folder.glob("chat_template.jinja")), *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    try:
        if files:
            return "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in ("chat_template.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                template = json.loads((folder / name).read_text(encoding="utf-8")).get("chat_template")
                if template is not None:
                    return template_text(_by_name(template))
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"the chat template in {folder} cannot be read: {error}") from error
    return ""


def _by_name(template: Any) -> Any:
    """Return several templates as transformers does: a list of names and templates becomes a mapping."""
    if isinstance(template, list):
        return {entry.get("name"): entry.get("template") for entry in template}
    return template
