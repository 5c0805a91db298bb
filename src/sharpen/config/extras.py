"""How a missing extra is installed beside this copy of the package.

In: the extra's name. Out: a command for a shell. The name alone, taken from an index, might fetch another's package, or
another version than the one that runs: what was installed from a folder, a repository or a file is named so.
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
"""The root of a clone, where this copy is one."""


def install_command(extra: str) -> str:
    """`pip install …` that adds `extra` to this copy of the package, however it was installed."""
    return command_for(extra, _origin(), Path.cwd())


def command_for(extra: str, origin: dict[str, Any] | None, folder: Path) -> str:
    """`origin` is what pip noted of where it took the package from (PEP 610), None for an index; `folder` is where the
    command will be typed."""
    if origin is None:
        return f"pip install 'sharpen[{extra}]'"
    url, revision = origin["url"], origin.get("vcs_info")
    if revision is not None:
        return f"pip install 'sharpen[{extra}] @ {revision['vcs']}+{url}@{revision['commit_id']}'"
    if "archive_info" in origin:
        return f"pip install 'sharpen[{extra}] @ {url}'"
    source = Path(url2pathname(urlsplit(url).path))
    shown = f"'.[{extra}]'" if source == folder else shlex.quote(f"{source}[{extra}]")
    return f"pip install {'-e ' if origin['dir_info'].get('editable') else ''}{shown}"


def _origin() -> dict[str, Any] | None:
    try:
        noted = distribution("sharpen").read_text("direct_url.json")
    except PackageNotFoundError:  # run from its sources, without being installed
        return {"url": _SOURCE.as_uri(), "dir_info": {"editable": True}}
    found: dict[str, Any] | None = json.loads(noted) if noted else None
    return found
