"""Compare a run with its plan: `plan.json` in the run directory.

In: the plan made before the run, and what was measured. Out: a `Comparison` for memory and for time: predicted before
the run, predicted from the actual lengths, measured, and the error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sharpen.errors import ConfigError
from sharpen.files import write_whole

FILE = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity: predicted before the run, predicted from the actual lengths (`known`), and measured."""

    name: str
    unit: str
    before: float | None
    known: float | None
    measured: float | None

    @property
    def predicted(self) -> float | None:
        """The prediction from the actual lengths, else the one before the run."""
        return self.before if self.known is None else self.known

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


def read_plan(run_dir: Path) -> dict[str, Any]:
    """Read the `plan.json` of a run. Raises `ConfigError` if there is none."""
    path = run_dir / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{run_dir} has no readable {FILE}: {error}") from error
    if not isinstance(content, dict) or "before" not in content:
        raise ConfigError(f"{path} is not the plan of a run: it has no 'before'")
    return content


def write_plan(run_dir: Path, content: Mapping[str, Any]) -> None:
    """Write `plan.json` atomically."""
    write_whole(run_dir / FILE, f"{json.dumps(content, indent=2)}\n", lasting=False)


def add_outcome(
    run_dir: Path, known: Mapping[str, Any] | None, steps_s: list[float], measured_mb: float | None
) -> list[Comparison]:
    """Add to an ended run's plan what was measured and the plan for the actual lengths. `steps_s` are the seconds of
    its steps."""
    content = read_plan(run_dir)
    content["measured"] = {
        "peak_memory_mb": None if measured_mb is None else round(measured_mb, 1),
        "step_s": round(median(steps_s), 3) if steps_s else None,
        "num_steps": len(steps_s),
    }
    if known is not None:
        content["known"] = known
    comparisons = compare(content)
    content["error"] = {comparison.name: comparison.error for comparison in comparisons}
    write_plan(run_dir, content)
    return comparisons


def compare(content: Mapping[str, Any]) -> list[Comparison]:
    """Compare predicted with measured memory and time, from the content of a `plan.json`."""
    before, known, measured = content["before"], content.get("known", {}), content.get("measured", {})
    return [
        Comparison(
            name=name,
            unit=unit,
            before=before.get(predicted_as),
            known=known.get(predicted_as),
            measured=measured.get(measured_as),
        )
        for name, unit, predicted_as, measured_as in (
            ("peak memory", "MiB", "comparable_mb", "peak_memory_mb"),
            ("step", "s", "step_s", "step_s"),
        )
    ]


def sentence(comparisons: list[Comparison]) -> str:
    """Format the comparison as one line for the end of a run."""
    parts = []
    for item in comparisons:
        if item.predicted is None or item.measured is None or item.error is None:
            continue
        form = ",.0f" if item.unit == "MiB" else ".3g"
        earlier = ""
        if item.before is not None and f"{item.before:{form}}" != f"{item.predicted:{form}}":
            earlier = f" ({item.before:{form}} before the lengths were known)"
        parts.append(
            f"{item.name} {item.predicted:{form}} {item.unit} predicted{earlier}, {item.measured:{form}} measured: "
            f"{item.error:+.0%}"
        )
    return f"plan: {'; '.join(parts) or 'nothing was measured to compare it with'}"
