"""What had another name before: this package (`agenttune`, its runs in `checkpoints/AgentTune/`), and settings.

Read, never written. In: what a file or a folder made then holds. Out: the names of today.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpen.config.run import DEFAULT_PROJECT

_PACKAGE = re.compile(r"agenttune(?=[.:])")
PROJECT = "AgentTune"
_TASKSET = "taskset"
"""The section that `task_args` was, which had defaults."""


def current(value: Any) -> Any:
    """A setting as it would be written today: `agenttune.module:function` is in `sharpen`; all else is what it was."""
    if isinstance(value, list):
        return [current(item) for item in value]
    return _PACKAGE.sub("sharpen", value, count=1) if isinstance(value, str) and _PACKAGE.match(value) else value


def current_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration file's content with the sections of today."""
    return {"task_args" if name == _TASKSET else name: value for name, value in content.items()}


def recorded_settings(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The settings in a `resolved.json`, by their dotted names of today; what the run derived is none."""
    settings = {}
    for name, entry in entries.items():
        section, _, rest = name.partition(".")
        if entry["origin"] == "derived" or (section == _TASKSET and entry["origin"] == "default"):
            continue
        settings[f"task_args.{rest}" if section == _TASKSET else name] = current(entry["value"])
    return settings


def former_run(root: Path, project: str, name: str) -> Path | None:
    """The folder of a run of that name which the default project had under its former name; None if there is none, if
    `project` is not the default, or if a run of today has the name."""
    former = root / PROJECT / name
    is_former = project == DEFAULT_PROJECT and former.is_dir() and not (root / project / name).exists()
    return former if is_former else None
