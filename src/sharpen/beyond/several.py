"""Several runs of one configuration, each in a process of its own, and the mean over them with its interval.

In: a configuration file, overrides. Out: the summary of each run. A run has a fixed name, made of the file's, so that
calling the same command again continues what was interrupted and trains nothing twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sharpen.show.monitor.statistics import student

# Trains one configuration several times, each in a process of its own.
#
# In: a configuration file, overrides. Out: the summary of each run. A run has a fixed name, made of the file's, so that
# calling the same command again continues what was interrupted and trains nothing twice.

Settings = Mapping[str, Any]
Train = Callable[[str, Settings], "Trained"]
"""Trains under a name, with settings."""
_PROGRAM = (sys.executable, "-m", "sharpen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A run that has ended. `summary` is empty if it failed, with the exit code `code`."""

    name: str
    settings: Settings
    code: int
    summary: Mapping[str, Any]

    @property
    def run_dir(self) -> str:
        """The run's directory; empty if it failed."""
        return str(self.summary.get("run_dir") or "")

    def accuracy(self, when: str, mode: str) -> float | None:
        """Return the mean reward of the held-out tasks `before` or `after` in a mode; None if it was not measured."""
        numbers = (self.summary.get(when) or {}).get(mode) or {}
        value = numbers.get("accuracy")
        return None if value is None else float(value)

    @property
    def gain(self) -> float | None:
        """How much better the model became by what decides the verdict; None if it was not measured."""
        value = (self.summary.get("verdict") or {}).get("difference")
        return None if value is None else float(value)


def trainer(options: Sequence[str], program: Sequence[str] = _PROGRAM) -> Train:
    """Return what trains with these options of `sharpen run` (`--config FILE`, `--set KEY=VALUE`). Its own output goes
    to stderr. Ctrl-C ends the run, with a checkpoint, and then this process."""

    def train(name: str, settings: Settings) -> Trained:
        overrides = [f"{key}={json.dumps(value)}" for key, value in {**settings, "name": name}.items()]
        command = [*program, "run", *options, "--json", *(word for one in overrides for word in ("--set", one))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 130:
            raise KeyboardInterrupt
        summary = json.loads(done.stdout) if done.returncode == 0 else {}
        return Trained(name=name, settings=settings, code=done.returncode, summary=summary)

    return train


def base_name(config: Path, name: str | None) -> str:
    """Return what the names of the runs begin with: the configured name, else that of the file."""
    return name or config.stem


# The mean over a few runs, with its interval.
#
# In: one number of each run. Out: a `Spread`. Runs are few, so the interval is Student's.


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The mean of `count` runs, its 95% interval (None: a single run), the standard deviation between runs."""

    mean: float
    low: float | None
    high: float | None
    deviation: float | None
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Return the mean with Student's interval; None without values."""
    if not values:
        return None
    mean, count = fmean(values), len(values)
    if count == 1:
        return Spread(mean=mean, low=None, high=None, deviation=None, count=1)
    low, high = student(values)
    return Spread(mean=mean, low=low, high=high, deviation=stdev(values), count=count)
