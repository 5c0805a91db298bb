"""Runs that started when `model.tool_call_parser` and `model.reasoning_parser` had formats as their defaults.

In: the resolved configuration of a run that may exist. Out: the same with the parsers that the run started with, as far
as neither it nor the new configuration chose any, so that its agent goes on to see the model's text as it did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sharpen.config.former import former_run
from sharpen.config.load import ResolvedConfig

_PARSERS = (".tool_call_parser", ".reasoning_parser")


def with_former_formats(resolved: ResolvedConfig, part: str = "") -> ResolvedConfig:
    """Return the configuration of a run that is about to start or to continue, with a notice for each parser that
    stays. `part` is the folder in the run's that has the settings."""
    config = resolved.config
    if config.name is None:
        return resolved
    parent = (Path(config.checkpoint_root_dir) / config.project).absolute()
    path = former_run(parent.parent, config.project, config.name) or parent / config.name
    former = _recorded(path / part / "resolved.json", resolved)
    for name, value in former.items():
        config = _with_default(config, name.split("."), value)
    notices = [f"{name} stays {value}, its default when this run started" for name, value in former.items()]
    return replace(resolved, config=config, notices=(*resolved.notices, *notices))


def _recorded(file: Path, resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the defaults of the parsers that a file has, if they are others than now."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return {
            name: entries[name]["value"]
            for name, origin in resolved.origins.items()
            if name.endswith(_PARSERS) and (origin, entries.get(name, {}).get("origin")) == ("default", "default")
            if entries[name]["value"] != "auto"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no run, or one that cannot be read, which is said where the settings are compared


def _with_default(settings: Any, place: Sequence[str], value: Any) -> Any:
    """Return settings with another default at a place, which does not count as given."""
    name, *rest = place
    if isinstance(settings, Mapping):
        return {**settings, name: _with_default(settings[name], rest, value)}
    inner = _with_default(getattr(settings, name), rest, value) if rest else value
    copy = settings.model_copy(update={name: inner})
    copy.model_fields_set.intersection_update(settings.model_fields_set)
    return copy
