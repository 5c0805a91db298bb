"""Runs in processes of their own that are killed amid a step, by the workflow, to be gone on with.

In: the function that runs (`run(folder, model, dataset, ..., steps=, workflow=)`, its run directory `P/fixed`), the
workflow, and when. Out: the run directory, as a killed process leaves it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import forked

from sharpen.learning.experience.reading import read_steps


def run_killed(
    run: Callable[..., Any], workflow: Callable[..., Any], *places: Path, recorded: int, **options: Any
) -> Path:
    """Run in another process, whose fifth rollout that begins after so many `recorded` steps kills it."""
    given = {
        "module": run.__module__,
        "run": run.__name__,
        "workflow": workflow.__name__,
        "places": [str(place) for place in places],
        "recorded": recorded,
        "options": options,
    }
    with forked(__file__, json.dumps(given)) as process:
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    return run_dir_in(places[0])


def run_dir_in(folder: Path) -> Path:
    """Where these runs are."""
    return folder / "P" / "fixed"


def main(given: dict[str, Any]) -> None:
    """What the other process does."""
    module = importlib.import_module(given["module"])
    workflow = getattr(module, given["workflow"])
    places = [Path(place) for place in given["places"]]
    metrics, journal = (run_dir_in(places[0]) / name for name in ("metrics.jsonl", "run.db"))
    begun = 0

    async def killing(task: Any, model: Any) -> Any:
        nonlocal begun
        begun += metrics.exists() and metrics.read_text().count("rollout/count") == given["recorded"]
        if begun == 5:
            while len(read_steps(journal)) < given["recorded"]:  # written by a thread of its own, after the metrics
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return await workflow(task, model)

    getattr(module, given["run"])(*places, workflow=killing, **given["options"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
