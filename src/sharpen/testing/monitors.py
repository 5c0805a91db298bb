"""Tries a monitor: a run that ends after its second step, and goes on from a checkpoint of the first.

In: what makes a sink of a `MonitoredRun`, and an empty folder. Out: nothing, or an `AssertionError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from sharpen.contracts import MonitoredRun, Sink, TakesRollouts, TakesSamples

T = TypeVar("T")

SETTINGS = MappingProxyType(
    {"seed": 0, "loss.kl": "k3", "deterministic": False, "name": None, "algorithm.learning_rate": 1e-6}
)
ROWS = (
    MappingProxyType({"rollout": "step-1/train/0/0", "reward": 1.0, "error": None}),
    MappingProxyType({"rollout": "step-1/train/0/1", "reward": None, "error": "timeout"}),
)


def check_monitor(make: Callable[[MonitoredRun], Sink], folder: Path) -> None:
    """Raise `AssertionError` if `make`, the class of a monitor, does not keep the contract of `Sink`.

    It is made, called and closed on a thread that is not the main one, as a run does, for a run and once more for the
    run that goes on. It gets numbers that are not finite, one step in two calls, texts and tables if it takes any; it
    may change none of what it gets, and write nothing in the run's folder but below `monitor`.
    """
    assert not any(folder.iterdir()), f"check_monitor needs an empty folder, and {folder} is not"
    run_dir = folder / "run"
    (run_dir / "monitor").mkdir(parents=True)
    for resume_step, steps in ((None, (1, 2)), (1, (2, 3))):
        run = MonitoredRun(
            run_dir=run_dir, project="A project", name="run 1", settings=SETTINGS, resume_step=resume_step
        )
        with ThreadPoolExecutor(1, thread_name_prefix="sharpen-monitor") as thread:
            what = "that begins" if resume_step is None else f"that goes on after step {resume_step}"
            thread.submit(_try, make, run, steps, f"a run {what}").result()
    beside = sorted(path.name for path in run_dir.iterdir() if path.name != "monitor")
    assert not beside, f"the monitor wrote {', '.join(beside)} in the run's folder: its place is the folder monitor"


def _try(make: Callable[[MonitoredRun], Sink], run: MonitoredRun, steps: tuple[int, ...], where: str) -> None:
    """Show a sink the steps of a run."""
    sink = _tried(f"making the monitor of {where}", make, run)
    for step in steps:
        first = MappingProxyType({"reward/mean": 0.5 * step, "trainer/loss": math.nan, "trainer/kl": math.inf})
        _tried(f"log({step}, {dict(first)}) in {where}", sink.log, step, first)
        _tried(f"log of more numbers of step {step} in {where}", sink.log, step, {"time/step_s": 2.0})
        if isinstance(sink, TakesSamples):
            _tried(f"sample({step}, ...) in {where}", sink.sample, step, "**best**: said `4`\n\n√")
        if isinstance(sink, TakesRollouts):
            _tried(f"rollouts({step}, ...) in {where}", sink.rollouts, step, ROWS)
    _tried(f"close() of {where}", sink.close)


def _tried(what: str, call: Callable[..., T], *arguments: object) -> T:
    try:
        return call(*arguments)
    except Exception as error:  # the code of the part under test
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error
