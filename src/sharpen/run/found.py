"""Runs on this disk: all below a folder, the one with a name, the latest.

In: a folder that holds `<project>/<name>` directories. Out: paths of run directories, which may still be running.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from sharpen.config.recorded import latest_last
from sharpen.errors import ConfigError
from sharpen.files import check_regular


def list_runs(root: Path) -> list[Path]:
    """Return the run directories below `root`, the one that last recorded something at the end."""
    return latest_last(path.parent for path in root.glob("*/*/resolved.json"))


def find_run(name: str | None, root: Path) -> Path:
    """Return the directory `name`, or the run of this name (or `project/name`, or a unique beginning) below `root`;
    None is the latest run. Raises `ConfigError` if there is none, or more than one, or if it holds what is no file."""
    found = _find_run(name, root)
    try:
        check_regular(found)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; remove it") from error
    return found


def run_named(name: str, root: Path) -> Path | None:
    """Return the only run below `root` of this whole name, or `project/name`; None if there is none."""
    found = [run for run in list_runs(root) if name.strip("/") in (run.name, f"{run.parent.name}/{run.name}")]
    return found[0] if len(found) == 1 else None


def _find_run(name: str | None, root: Path) -> Path:
    if name is not None and Path(name).is_dir():
        return Path(name)
    runs = list_runs(root)
    if not runs:
        missing = "there is no run" if name is None else f"{name!r} is no directory, and there is no run"
        raise ConfigError(f"{missing} below {root}: give a run's directory, or the folder of your runs with --root")
    if name is None:
        return runs[-1]
    exact = [run for run in runs if name.strip("/") in (run.name, f"{run.parent.name}/{run.name}")]
    chosen = exact or [run for run in runs if run.name.startswith(name)]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        names = ", ".join(f"{run.parent.name}/{run.name}" for run in chosen[-4:])
        raise ConfigError(f"{len(chosen)} runs below {root} are called {name!r}, e.g. {names}: give more of the name")
    near = difflib.get_close_matches(name, [run.name for run in runs], n=3) or [runs[-1].name]
    raise ConfigError(
        f"no directory and no run below {root} is called {name!r}; there are {len(runs)} runs, e.g. "
        f"{', '.join(near)} (sharpen ls lists them)"
    )
