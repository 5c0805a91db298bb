"""How long a step takes: only as it was measured, never computed from rates.

In: a run's settings, the directories of earlier runs. Out: `StepTime`, which says what was measured; None where nothing
was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.plan.hardware import Hardware
from sharpen.plan.record import FILE, read_plan

_WITHOUT_EFFECT: dict[str, Any] = {
    **dict.fromkeys(("project", "name", "checkpoint_root_dir", "monitor_type", "time_limit_s", "seed"), True),
    **dict.fromkeys(("evaluation", "eval_dataset", "check", "certificate"), True),
    "train_dataset": {"total_steps", "total_epochs"},
}
"""Settings that the time of a step does not depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, and what they were measured by."""

    seconds: float
    source: str


def settings_key(config: RunConfig) -> str:
    """Equal for two runs whose steps do the same work."""
    content = config.model_dump(mode="json", exclude=_WITHOUT_EFFECT)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def of_last_run(config: RunConfig, hardware: Hardware, run_dirs: Iterable[Path]) -> StepTime | None:
    """As the last of these runs that had the same settings and devices measured it."""
    wanted = settings_key(config), hardware.name
    files = [run_dir / FILE for run_dir in run_dirs if (run_dir / FILE).exists()]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        with contextlib.suppress(ConfigError):  # another's file, which may hold anything
            content = read_plan(file.parent)
            before, measured = content["before"], content.get("measured", {})
            if (before.get("settings"), before.get("hardware")) == wanted and measured.get("step_s") is not None:
                source = f"median of {measured['num_steps']} steps of {file.parent.name}"
                return StepTime(seconds=measured["step_s"], source=source)
    return None
