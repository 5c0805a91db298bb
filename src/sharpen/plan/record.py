"""A plan beside what came of it: `plan.json` in the directory of the run.

In: the plan that was made before the run, and what was measured. Out: `Comparison`: predicted, predicted again with the
lengths that came, measured, and the errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sharpen.errors import ConfigError

FILE = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity: as predicted before the run, as predicted with the lengths that came, as measured."""

    name: str
    unit: str
    before: float | None
    known: float | None
    measured: float | None

    @property
    def predicted(self) -> float | None:
        """With the lengths that came, else as before the run."""
        return self.before if self.known is None else self.known

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


def read_plan(run_dir: Path) -> dict[str, Any]:
    """What `plan.json` of a run holds. Raises `ConfigError` if there is none."""
    path = run_dir / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{run_dir} holds no plan of a run: {error}") from error
    if not isinstance(content, dict) or "before" not in content:
        raise ConfigError(f"{path} is no plan of a run")
    return content


def write_plan(run_dir: Path, content: Mapping[str, Any]) -> None:
    """Write `plan.json`, whole or not at all."""
    temporary = run_dir / f".{FILE}.tmp"
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, run_dir / FILE)


def add_outcome(
    run_dir: Path, known: Mapping[str, Any] | None, steps_s: list[float], measured_mb: float | None
) -> list[Comparison]:
    """Add what was measured, and the plan with the lengths that came, to that of a run that has ended. `steps_s` are
    the seconds of its steps."""
    content = read_plan(run_dir)
    content["measured"] = {
        "peak_memory_mb": None if measured_mb is None else round(measured_mb, 1),
        "step_s": round(median(steps_s), 3) if steps_s else None,
        "num_steps": len(steps_s),
    }
    if known is not None:
        content["known"] = known
    found = compared(content)
    content["error"] = {one.name: one.error for one in found}
    write_plan(run_dir, content)
    return found


def compared(content: Mapping[str, Any]) -> list[Comparison]:
    """Memory and time of a plan's content."""
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


def sentence(found: list[Comparison]) -> str:
    """One line for the end of a run."""
    parts = []
    for one in found:
        if one.predicted is None or one.measured is None or one.error is None:
            continue
        form = ",.0f" if one.unit == "MiB" else ".3g"
        earlier = ""
        if one.before is not None and f"{one.before:{form}}" != f"{one.predicted:{form}}":
            earlier = f" ({one.before:{form}} before the lengths were known)"
        parts.append(
            f"{one.name} {one.predicted:{form}} {one.unit} predicted{earlier}, {one.measured:{form}} measured: "
            f"{one.error:+.0%}"
        )
    return f"plan: {'; '.join(parts) or 'nothing was measured that it could be compared with'}"
