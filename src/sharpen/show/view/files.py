"""Reads the files of a run directory, whatever state they are in.

In: a run directory. Out: a `RunFiles`: the rows of `metrics.jsonl`, the content of the JSON files, and a sentence for
each file that is missing or damaged. Nothing here raises because of what a file holds.
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sharpen.evidence.ended import Ended

Row = Mapping[str, float]
_BRIEF = re.compile(
    rb'"(step|time|reward/mean|trainer/loss|tokens/sampled|eval/loss|eval/(?:greedy|sampled)/(?:accuracy|low|high))"'
    rb": ?(-?\d[\d.eE+-]*)"
)
"""What the table of runs shows of a line of `metrics.jsonl`; to parse whole lines takes five times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of a run. `rows` are the lines of `metrics.jsonl`, each with `step` and mostly `time` (seconds since
    1970); the dicts are empty for a file that is missing or damaged. `problems` says what is missing, a sentence
    each."""

    path: Path
    rows: tuple[Row, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    resolved: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def setting(self, name: str) -> Any:
        """Return the value of a setting by its dotted name; None if it is not recorded."""
        entry = self.resolved.get(name)
        return entry.get("value") if isinstance(entry, Mapping) else None

    def values(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric where it was measured; of a step that was repeated, the last."""
        found = {int(row["step"]): row[name] for row in self.rows if name in row}
        return sorted(found.items())


def read_files(path: Path) -> RunFiles:
    """Read the files of a run directory."""
    return _with_rows(path, *read_rows(path / "metrics.jsonl"))


def read_brief(path: Path) -> RunFiles:
    """Read what the table of runs shows: of the rows a few numbers only, and not whether each line is whole."""
    return _with_rows(path, *_read_brief_rows(path / "metrics.jsonl"))


def _with_rows(path: Path, rows: list[Row], problems: list[str]) -> RunFiles:
    contents: dict[str, Mapping[str, Any]] = {}
    for name in ("summary", "certificate", "resolved"):
        contents[name], problem = read_json(path / f"{name}.json")
        problems += problem
    if not (path / "run.db").exists():
        problems.append("run.db is missing: no rollouts")
    if not rows and Ended.of(contents["summary"]) is not None:  # it ended before it wrote them
        problems = [problem for problem in problems if " is missing" not in problem]
    return RunFiles(path=path, rows=tuple(rows), problems=tuple(problems), **contents)


def read_json(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Return the object in a JSON file, and what is wrong with the file."""
    try:
        content = json.loads(_read(path).decode("utf-8"))
    except FileNotFoundError:
        return {}, [f"{path.name} is missing"]
    except OSError as error:
        return {}, [f"{path.name} cannot be read: {error.strerror}"]
    except (ValueError, RecursionError):
        return {}, [f"{path.name} is damaged: it is not JSON"]
    if not isinstance(content, dict):
        return {}, [f"{path.name} is damaged: it holds no object"]
    return content, []


def _read(path: Path) -> bytes:
    """Return the content of a file. Raises `OSError`, also for what is no file: to read a pipe may never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_bytes()


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the lines of `metrics.jsonl` with their numbers, and what is wrong with the file. A last line without its
    end is left out silently: the run is writing it, or was killed there."""
    try:
        text = _read(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return [], [f"{path.name} is missing: no curves"]
    except OSError as error:
        return [], [f"{path.name} cannot be read: {error.strerror}"]
    rows: list[Row] = []
    damaged: list[int] = []
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], 1):
        row = _row(line)
        if row is None:
            damaged.append(number)
        else:
            rows.append(row)
    if lines[-1] and (row := _row(lines[-1])) is not None:
        rows.append(row)
    if not damaged:
        return rows, []
    shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
    return rows, [f"{path.name} is damaged: {len(damaged)} lines are left out (line {shown})"]


def _read_brief_rows(path: Path) -> tuple[list[Row], list[str]]:
    try:
        lines = _read(path).split(b"\n")
    except FileNotFoundError:
        return [], [f"{path.name} is missing: no curves"]
    except OSError as error:
        return [], [f"{path.name} cannot be read: {error.strerror}"]
    rows: list[Row] = []
    for line in lines:
        if line.startswith(b"{") and line.endswith(b"}"):
            row = {
                name.decode(): number for name, text in _BRIEF.findall(line) if (number := _number(text)) is not None
            }
            if row.get("step", -1.0) >= 0:
                rows.append(row)
    return rows, []


def _number(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _row(line: str) -> Row | None:
    try:
        content = json.loads(line)
        numbers = {
            name: float(value)
            for name, value in content.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        return numbers if numbers["step"] >= 0 else None
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None
