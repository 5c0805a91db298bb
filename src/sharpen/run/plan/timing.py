"""The time of a step, taken from earlier runs: it is never computed from throughput rates.

In: a run's settings, the directories of earlier runs. Out: a `StepTime` with its source; None if nothing was measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.config.recorded import latest_last
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.run.plan.hardware import Hardware
from sharpen.run.plan.record import FILE, read_plan

_WITHOUT_EFFECT: dict[str, Any] = {
    **dict.fromkeys(("project", "name", "checkpoint_root_dir", "monitor_type"), True),
    **dict.fromkeys(("monitor_rollouts", "time_limit_s", "seed"), True),
    **dict.fromkeys(("evaluation", "eval_dataset", "check", "certificate"), True),
    "train_dataset": {"total_steps", "total_epochs"},
}
"""Settings that do not affect the time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, and where they were measured."""

    seconds: float
    source: str


def settings_key(config: RunConfig) -> str:
    """Return a key that is equal for two runs whose steps do the same work."""
    content = config.model_dump(mode="json", exclude=_WITHOUT_EFFECT)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def last_step_time(config: RunConfig, hardware: Hardware, run_dirs: Iterable[Path]) -> StepTime | None:
    """Return the step time of the latest of these runs with the same settings and devices; None if there is none."""
    wanted = settings_key(config), hardware.name
    for run_dir in reversed(latest_last(run_dir for run_dir in run_dirs if (run_dir / FILE).exists())):
        with contextlib.suppress(ConfigError):  # the file of another program may hold anything
            content = read_plan(run_dir)
            before, measured = content["before"], content.get("measured", {})
            if (before.get("settings"), before.get("hardware")) == wanted and measured.get("step_s") is not None:
                source = f"median of {measured['num_steps']} steps of {run_dir.name}"
                return StepTime(seconds=measured["step_s"], source=source)
    return None
