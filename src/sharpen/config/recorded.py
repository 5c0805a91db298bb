"""When a run last recorded something, by what it wrote itself: the times of its files say less, since a copy, a
checkout of git or the edit of a note makes them new.

In: a run directory. Out: Unix times; its last line of metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STARTED = "run.started"
"""The entry of `resolved.json` with the Unix time at which the run last started."""
_TAIL = 65_536
"""Bytes at the end of `metrics.jsonl` that hold its last line."""


def latest_last(run_dirs: Iterable[Path]) -> list[Path]:
    """Return run directories in the order of what they last recorded."""
    return sorted(run_dirs, key=lambda run: (last_recorded(run), run))


def last_recorded(run_dir: Path) -> float:
    """Return the Unix time of the run's last record: its last start, or the last line of its metrics; 0 if it has
    none."""
    last, resolved = _number(last_line(run_dir / "metrics.jsonl").get("time")), run_dir / "resolved.json"
    try:
        started = json.loads(resolved.read_bytes())[STARTED]["value"] if resolved.is_file() else 0.0
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # of an older version, or damaged
        return last
    return max(last, _number(started))


def last_line(metrics: Path) -> Mapping[str, Any]:
    """Return the last whole line of a `metrics.jsonl`; an empty one if there is none."""
    if not metrics.is_file():
        return {}
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            content = json.loads(line)
            int(content["step"])
        except (
            ArithmeticError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ):  # cut off by a kill, or by our own reading
            continue
        return dict(content)
    return {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
