"""A plan beside what came of it: `plan.json` in the directory of the run.

In: the plan that was made before the run, its settings, and what the run left. Out: `Comparison`: predicted, predicted
again with the lengths that came, measured, and the errors.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sharpen.errors import ConfigError
from sharpen.plan.memory import SLACK, Place
from sharpen.plan.predict import MB, Plan
from sharpen.plan.workload import metrics_of

FILE = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One quantity: as predicted before the run, as predicted with the lengths that came, as measured. `low` and `high`
    are the range that was said to be likely."""

    name: str
    unit: str
    before: float | None
    known: float | None
    measured: float | None
    low: float | None = None
    high: float | None = None

    def error(self, predicted: float | None) -> float | None:
        """(predicted - measured) / measured."""
        if predicted is None or not self.measured:
            return None
        return (predicted - self.measured) / self.measured


def write_plan(run_dir: Path, before: Plan) -> None:
    """Write the prediction that is made before a run."""
    _write(run_dir / FILE, {"before": {**before.to_json(), "comparable_mb": comparable_mb(before)}})


def add_outcome(run_dir: Path, known: Plan | None, measured_mb: float | None) -> list[Compared]:
    """Add what was measured, and the prediction with the lengths that came, to the plan of a run that has ended."""
    content = read_plan(run_dir)
    steps = [float(row["time/step_s"]) for row in metrics_of(run_dir) if "time/step_s" in row]
    content["measured"] = {
        "peak_memory_mb": None if measured_mb is None else round(measured_mb, 1),
        "step_s": round(median(steps), 3) if steps else None,
        "num_steps": len(steps),
    }
    if known is not None:
        content["known"] = {**known.to_json(), "comparable_mb": comparable_mb(known)}
    found = compared(content)
    content["error"] = {one.name: {"before": one.error(one.before), "known": one.error(one.known)} for one in found}
    _write(run_dir / FILE, content)
    return found


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


def compared(content: dict[str, Any]) -> list[Compared]:
    """Memory and time of a plan's content."""
    before, known, measured = content["before"], content.get("known", {}), content.get("measured", {})
    return [
        Compared(
            name="peak memory",
            unit="MiB",
            before=before.get("comparable_mb"),
            known=known.get("comparable_mb"),
            measured=measured.get("peak_memory_mb"),
        ),
        Compared(
            name="step",
            unit="s",
            before=before.get("step_s"),
            known=known.get("step_s"),
            measured=measured.get("step_s"),
            low=known.get("step_low_s") or before.get("step_low_s"),
            high=known.get("step_high_s") or before.get("step_high_s"),
        ),
    ]


def comparable_mb(found: Plan) -> float | None:
    """The part of the prediction that the coordinator's process can measure of itself: on a CPU what it holds, on a GPU
    what its allocator gave out; without an engine in another process. None where the trainer is in others."""
    if found.trainer_apart:
        return None
    place: Place = found.places[0]
    left_out = {"process and libraries"} if found.hardware.kind == "cuda" else set()
    if found.engine_apart:
        left_out |= {item.role for item in place.items if item.role.startswith("engine: ")}
    items = tuple(item for item in place.items if item.role not in left_out)
    own = Place(name=place.name, count=1, capacity=place.capacity, items=items)
    return round(own.phase_peak * (1 + (SLACK if found.hardware.kind == "cpu" else 0)) / MB, 1)


def sentence(found: list[Compared]) -> str:
    """One line for the end of a run."""
    parts = []
    for one in found:
        predicted = one.known if one.known is not None else one.before
        error = one.error(predicted)
        if error is None or predicted is None or one.measured is None:
            continue
        form = ",.0f" if one.unit == "MiB" else ".3g"
        earlier = ""
        if one.before is not None and one.known is not None and f"{one.before:{form}}" != f"{one.known:{form}}":
            earlier = f" ({one.before:{form}} before the lengths were known)"
        parts.append(
            f"{one.name} {predicted:{form}} {one.unit} predicted{earlier}, {one.measured:{form}} measured: {error:+.0%}"
        )
    return f"plan: {'; '.join(parts) or 'nothing was measured that it could be compared with'}"


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
