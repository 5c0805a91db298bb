"""The shell command that installs a missing extra of this copy of the package.

In: the extra's name. Out: a command. A copy installed from a folder, a repository or a file is named by that source,
since the bare name might fetch a different package or version from the index.
"""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

_SOURCE = Path(__file__).parents[3]
"""The root of the repository, if this copy runs from a clone."""


def install_command(extra: str) -> str:
    """Return the `pip install` command that adds `extra` to this copy of the package."""
    return command_for(extra, _origin(), Path.cwd())


def command_for(extra: str, origin: dict[str, Any] | None, folder: Path) -> str:
    """Return the command for a package of this `origin`, as recorded by pip (PEP 610; None for an index), to be run in
    `folder`."""
    if origin is None:
        return f"pip install 'sharpen[{extra}]'"
    url, revision = origin["url"], origin.get("vcs_info")
    if revision is not None:
        return f"pip install 'sharpen[{extra}] @ {revision['vcs']}+{url}@{revision['commit_id']}'"
    if "archive_info" in origin:
        return f"pip install 'sharpen[{extra}] @ {url}'"
    source = Path(url2pathname(urlsplit(url).path))
    target = f"'.[{extra}]'" if source == folder else shlex.quote(f"{source}[{extra}]")
    return f"pip install {'-e ' if origin['dir_info'].get('editable') else ''}{target}"


def _origin() -> dict[str, Any] | None:
    try:
        recorded = distribution("sharpen").read_text("direct_url.json")
    except PackageNotFoundError:  # run from its source folder, not installed
        return {"url": _SOURCE.as_uri(), "dir_info": {"editable": True}}
    origin: dict[str, Any] | None = json.loads(recorded) if recorded else None
    return origin
