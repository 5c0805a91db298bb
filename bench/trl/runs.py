"""What a run of either side of `bench-trl` leaves behind, and the statistics over several of them.

In: steps as they ended, rewards of held-out tasks. Out: `run.json` and `held_out.json`; medians, bands and intervals.
Needs neither TRL nor torch.

Shape suffixes: S seeds, T steps or seconds of a grid.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from sharpen.show.monitor.figures import ends, fixed
from sharpen.show.monitor.statistics import student_quantile
from sharpen.show.monitor.summary import peak_memory_mb, process_seconds

NUM_THREADS = 2
Mode = Literal["greedy", "sampled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: mean training reward, seconds from the beginning of training to its end, tokens in its loss."""

    reward: float
    end_s: float
    trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run. `process_s` and `peak_memory_mb` are of its whole process, imports and loading included."""

    side: str
    seed: int
    steps: tuple[Step, ...]
    process_s: float
    peak_memory_mb: float

    @property
    def step_s(self) -> list[float]:
        """Seconds from the end of a step to the end of the next, so that nothing in between is left out."""
        ends = [0.0, *(step.end_s for step in self.steps)]
        return [after - before for before, after in pairwise(ends)]

    @property
    def train_s(self) -> float:
        """Seconds from the beginning of training to the end of the last step."""
        return self.steps[-1].end_s

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss of all steps."""
        return sum(step.trained_tokens for step in self.steps)

    def steps_at(self, seconds: float) -> int:
        """How many steps it had made by then, the one it was in included (at most all)."""
        ends = [step.end_s for step in self.steps]
        return min(bisect.bisect_left(ends, seconds) + 1, len(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Rewards of the held-out tasks, in their order."""

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    def accuracy(self, mode: Mode) -> float:
        """Mean reward."""
        return statistics.fmean(self.greedy if mode == "greedy" else self.sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A difference of shares with its 95% interval; infinitely wide where there is only one seed. In print: in points,
    hundredths of the whole."""

    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        difference = fixed(100 * self.difference, 1, sign=True)
        if math.isinf(self.low):
            return difference
        shown = ends(100 * self.low, 100 * self.high, decimals=1, sign=True, unit="seed")
        return f"{difference} ({shown[1:-1]})"


def difference(ours_S: Sequence[float], theirs_S: Sequence[float]) -> Interval:
    """Mean of ours less mean of theirs; what varies is the seed. Welch's standard error, with the degrees of freedom of
    one side alone (as few as they can be), which makes the interval rather too wide than too narrow.

    Welch, "The generalization of Student's problem", Biometrika 34 (1947).
    """
    num_seeds = min(len(ours_S), len(theirs_S))
    mean = statistics.fmean(ours_S) - statistics.fmean(theirs_S)
    if num_seeds < 2:
        return Interval(difference=mean, low=-math.inf, high=math.inf)
    error = math.sqrt(sum(statistics.variance(side) / len(side) for side in (ours_S, theirs_S)))
    half = student_quantile(num_seeds - 1) * error
    return Interval(difference=mean, low=mean - half, high=mean + half)


def quarter(num_steps: int) -> int:
    """A quarter of a run's steps, at least one."""
    return max(1, num_steps // 4)


def smoothed(values_T: Sequence[float], reach: int = 2) -> list[float]:
    """Mean of each value and up to `reach` neighbours on each side."""
    return [statistics.fmean(values_T[max(0, index - reach) : index + reach + 1]) for index in range(len(values_T))]


def band(values_ST: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Lowest, mean and highest over the seeds, at each place."""
    columns = list(zip(*values_ST, strict=True))
    return (
        [min(each) for each in columns],
        [statistics.fmean(each) for each in columns],
        [max(each) for each in columns],
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What both sides are told."""
    parser.add_argument("--out", type=Path, required=True, help="folder for the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)


def write_run(out: Path, *, side: str, seed: int, steps: Sequence[Step]) -> None:
    """Write `run.json`; to be called at the end of the run's own process, which it describes."""
    memory = peak_memory_mb()
    assert memory is not None, "the peak memory of a process is not known on this system"
    run = Run(side=side, seed=seed, steps=tuple(steps), process_s=process_seconds(), peak_memory_mb=memory)
    write_json(out / "run.json", asdict(run))


def read_run(out: Path) -> Run:
    """The way back."""
    content = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return Run(**{**content, "steps": tuple(Step(**step) for step in content["steps"])})


def write_held(path: Path, held: Held) -> None:
    """Write the rewards of a model."""
    write_json(path, asdict(held))


def read_held(path: Path) -> Held:
    """The way back."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Held(greedy=tuple(content["greedy"]), sampled=tuple(content["sampled"]))


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all, so that what is there can be relied on after a cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
