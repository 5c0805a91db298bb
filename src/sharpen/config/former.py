"""What this package was called before: `agenttune`, its runs in `checkpoints/AgentTune/`.

Read, never written. In: a name that a file or a folder made then holds. Out: the name of today.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sharpen.config.run import DEFAULT_PROJECT

_PACKAGE = re.compile(r"agenttune(?=[.:])")
PROJECT = "AgentTune"


def current(value: Any) -> Any:
    """A setting as it would be written today: `agenttune.module:function` is in `sharpen`; all else is what it was."""
    if isinstance(value, list):
        return [current(item) for item in value]
    return _PACKAGE.sub("sharpen", value, count=1) if isinstance(value, str) and _PACKAGE.match(value) else value


def former_run(root: Path, project: str, name: str) -> Path | None:
    """The folder of a run of that name which the default project had under its former name; None if there is none, if
    `project` is not the default, or if a run of today has the name."""
    former = root / PROJECT / name
    is_former = project == DEFAULT_PROJECT and former.is_dir() and not (root / project / name).exists()
    return former if is_former else None
