"""`summary.json`: the results of a run, and the resources it used.

In: the evaluations before and after, and the counts of the run. Out: one JSON file, written atomically.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sharpen.evidence.ended import Ended
from sharpen.files import write_whole
from sharpen.show.monitor.statistics import (
    Accuracy,
    Difference,
    Evaluation,
    accuracy,
    distinct_rewards,
    distinct_values,
    paired_difference,
)
from sharpen.show.monitor.verdict import Verdict

_LOADED = time.monotonic()
_YOUNG_S = 60.0
"""A process of less age has done nothing yet but import what it runs."""
_runs = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The results. `seconds` is the time of a `run_clock`, evaluations included; `seconds_to_first_step` is
    the time until the first update was done, without the evaluation before training (None: no step was trained).

    `sampled_tokens` were sampled by the engine for training, `trained_tokens` carried loss, `computed_tokens` went
    through the trainer's forward pass, prompts included. `held_out` holds the numbers of a run without rollouts on
    held-out rows, before and after (empty if not measured). `verdict` is None for a run that has not ended, `error` for
    one that nothing ended early.
    """

    before: Evaluation | None
    after: Evaluation | None
    seconds: float
    seconds_to_first_step: float | None
    steps: int
    rollouts: int
    sampled_tokens: int
    trained_tokens: int
    computed_tokens: int
    peak_memory_mb: float | None
    model_dir: Path | None
    run_dir: Path
    held_out: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    verdict: Verdict | None = None
    error: Ended | None = None


def write_summary(path: Path, summary: Summary) -> None:
    """Write `summary.json`. Unknown numbers are null."""
    among = distinct_rewards(summary.before, summary.after)
    content: dict[str, Any] = {
        "error": None if summary.error is None else asdict(summary.error),
        "verdict": None if summary.verdict is None else asdict(summary.verdict),
        "before": _modes(summary.before, among),
        "after": _modes(summary.after, among),
    }
    before, after = (
        dict(evaluation.further) if evaluation is not None else {} for evaluation in (summary.before, summary.after)
    )
    if names := dict.fromkeys([*before, *after]):
        content["further"] = {
            name: {"before": _modes(before.get(name), among), "after": _modes(after.get(name), among)} for name in names
        }
    if measured := _metrics(summary.before, summary.after):
        content["metrics"] = measured
    if summary.held_out:
        content["held_out"] = {name: dict(numbers) for name, numbers in summary.held_out.items()}
    content |= {
        "seconds": round(summary.seconds, 3),
        "seconds_to_first_step": _rounded(summary.seconds_to_first_step),
        "steps": summary.steps,
        "rollouts": summary.rollouts,
        "sampled_tokens": summary.sampled_tokens,
        "trained_tokens": summary.trained_tokens,
        "computed_tokens": summary.computed_tokens,
        "peak_memory_mb": _rounded(summary.peak_memory_mb),
        "model_dir": str(summary.model_dir) if summary.model_dir else None,
        "run_dir": str(summary.run_dir),
    }
    write_whole(path, f"{json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)}\n", lasting=False)


def evaluation_json(found: Evaluation) -> dict[str, Any]:
    """Return one evaluation as JSON: the accuracy of each mode with its interval, the metrics, the further sets."""
    among = distinct_rewards(found)
    content: dict[str, Any] = {"held_out": _modes(found, among), "no_result": found.no_result or None}
    if found.further:
        content["further"] = {name: _modes(inner, among) for name, inner in found.further.items()}
    if found.metrics:
        content["metrics"] = {
            mode: {
                name: _numbers(accuracy(values.values(), among=distinct_values(name, found)))
                for name, values in by_name.items()
            }
            for mode, by_name in found.metrics.items()
        }
    return content


def _metrics(before: Evaluation | None, after: Evaluation | None) -> dict[str, Any]:
    """Return what workflow and judge measured on held-out tasks, by mode and name: before, after, and the paired
    difference."""
    metrics: dict[str, Any] = {}
    first = before.metrics if before is not None else {}
    second = after.metrics if after is not None else {}
    for mode in dict.fromkeys([*first, *second]):
        olds, news = first.get(mode, {}), second.get(mode, {})
        metrics[mode] = {
            name: _compared(olds.get(name, {}), news.get(name, {}), distinct_values(name, before, after))
            for name in sorted({*olds, *news})
        }
    return metrics


def _compared(before: Mapping[str, float], after: Mapping[str, float], among: frozenset[float]) -> dict[str, Any]:
    return {
        "before": _numbers(accuracy(before.values(), among=among)),
        "after": _numbers(accuracy(after.values(), among=among)),
        "difference": _numbers(paired_difference(before, after, among=among)),
    }


def _modes(evaluation: Evaluation | None, among: frozenset[float]) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {mode: _numbers(accuracy(rewards.values(), among=among)) for mode, rewards in evaluation.rewards.items()}


def _numbers(result: Accuracy | Difference) -> Mapping[str, float | int | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(result).items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def peak_memory_mb() -> float | None:
    """Return the peak resident memory of this process in MiB; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # macOS counts bytes, Linux KiB


def process_seconds() -> float:
    """Return the seconds since this process started (Linux), or since this module was loaded (elsewhere)."""
    status = Path("/proc/self/stat")
    if not status.exists():
        return time.monotonic() - _LOADED
    started_ticks = int(status.read_text().rpartition(")")[2].split()[19])  # the 22nd field; the name may hold spaces
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def run_clock() -> Callable[[], float]:
    """Return a clock of the run that begins now, in seconds. Where the run is all that its process does, the imports
    before it count; what a notebook or an earlier run did before does not."""
    age = process_seconds()
    began = time.monotonic() - (age if next(_runs) == 0 and age < _YOUNG_S else 0.0)
    return lambda: time.monotonic() - began
