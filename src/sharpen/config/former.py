"""Former names: of this package (`agenttune`, with runs in `checkpoints/AgentTune/`) and of settings.

In: the content of files and folders of earlier versions, which are only read. Out: the current names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpen.errors import ConfigError

_PACKAGE = re.compile(r"agenttune(?=[.:])")
DEFAULT_PROJECT, PROJECT = "Sharpen", "AgentTune"
"""The project of runs that name none, and its former name."""
_TASKSET = "taskset"
"""The former name of `task_args`, which had defaults."""


def current(value: Any) -> Any:
    """Return a value with the current name of the package: `agenttune.module:function` becomes `sharpen.…`."""
    if isinstance(value, list):
        return [current(item) for item in value]
    return _PACKAGE.sub("sharpen", value, count=1) if isinstance(value, str) and _PACKAGE.match(value) else value


def current_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration file's content with the current names of sections."""
    return {"task_args" if name == _TASKSET else name: value for name, value in content.items()}


def recorded_settings(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings in a `resolved.json` by their current dotted names, without derived values."""
    settings = {}
    for name, entry in entries.items():
        if not isinstance(entry, Mapping) or not {"value", "origin"} <= entry.keys():
            raise ConfigError(f"resolved.json is damaged: {name!r} has no value and origin, but is {entry!r}")
        section, _, rest = name.partition(".")
        if entry["origin"] == "derived" or (section == _TASKSET and entry["origin"] == "default"):
            continue
        settings[f"task_args.{rest}" if section == _TASKSET else name] = current(entry["value"])
    return settings


def former_run(root: Path, project: str, name: str) -> Path | None:
    """Return the folder of a run under the default project's former name. None if there is none, if `project` is not
    the default, or if the current folder has a run of this name."""
    former = root / PROJECT / name
    is_former = project == DEFAULT_PROJECT and former.is_dir() and not (root / project / name).exists()
    return former if is_former else None
