"""The plan of a run's memory and time: made before it starts, compared with the measurements at its end.

In: the job of a run, and its directory. Out: lines for the user and `plan.json`; `ConfigError` if weights, gradients
and moments alone exceed the machine's memory. A model that cannot be planned is trained without a plan.

This check takes some hundredths of a second, the whole plan about half a second, once a run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError, ModelError
from sharpen.learning.recipe import RolloutRecipe, TrainingJob
from sharpen.show.monitor.summary import peak_memory_mb

if TYPE_CHECKING:
    from sharpen.run.plan.case import Case
    from sharpen.run.plan.predict import Plan
    from sharpen.run.plan.workload import Workload

LEAST_PARAMETERS = 1_000_000
"""A smaller model gets no plan: most of its memory is that of Python and its libraries."""
_GIB = 2**30


def before_run(job: TrainingJob, run_dir: Path) -> Iterator[str]:
    """Write the plan of a run that is about to start. Yield warnings about memory, and the seconds of a step if an
    earlier run measured them. Raises `ConfigError` if memory is certain to be short."""
    from sharpen.run.plan.predict import last_step_time, plan
    from sharpen.run.plan.record import write_plan
    from sharpen.run.plan.workload import expected

    config = job.config
    try:
        case = _case(job, expected(config))
        short = "" if config.uses_ray else certainly_short(case)
        if case.models.policy.parameters < LEAST_PARAMETERS:
            return
        if short:
            raise ConfigError(f"{short}: `sharpen plan` shows which changes make it fit")
        time = last_step_time(config, case.hardware, run_dir.parent.iterdir())
        found = plan(case, time=time, suggests=False)
        write_plan(run_dir, {"before": found.to_json()})
    except ModelError as error:
        yield f"no plan of this run's memory: {error}"
        return
    if time is not None:
        yield f"a step takes {time.seconds:,.3g} s (measured: {time.source})"
    if not config.uses_ray:
        yield from _warnings(found)


def after_run(job: TrainingJob, run_dir: Path) -> Iterator[str]:
    """Add the measurements to the plan of a run that has ended, and yield a line with the plan's error; nothing for a
    run without a plan."""
    from sharpen.run.plan.predict import plan
    from sharpen.run.plan.record import FILE, add_outcome, read_plan, sentence
    from sharpen.run.plan.workload import metrics_of, of_run

    if not (run_dir / FILE).exists():
        return
    known, lengths = None, of_run(job.config, run_dir)
    if lengths is not None:
        capacity = read_plan(run_dir)["before"]["places"][0]["capacity_mb"] * 2**20  # the run itself takes some now
        with contextlib.suppress(ModelError):  # the model's folder may be gone
            case = _case(job, lengths)
            hardware = replace(case.hardware, memory_bytes=capacity)
            known = plan(replace(case, hardware=hardware), suggests=False).to_json()
    steps = [float(row["time/step_s"]) for row in metrics_of(run_dir) if "time/step_s" in row]
    yield sentence(add_outcome(run_dir, known, steps, measured_mb(job.config)))


def measured_mb(config: RunConfig) -> float | None:
    """Return the peak memory of this process in MiB: on the GPU it trains on, else on the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and config.engine.device != "cpu" and torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    return peak_memory_mb()


def certainly_short(case: Case) -> str:
    """Return a sentence if weights, gradients and moments alone exceed the memory, else an empty string. On a CPU only
    trained models count, against the whole memory: the system can drop frozen weights and read them again."""
    from sharpen.machine import total_bytes
    from sharpen.run.plan.memory import places

    capacity = total_bytes() if case.on_cpu else case.hardware.memory_bytes
    for place in places(case, certain=True):
        items = [item for item in place.items if not case.on_cpu or item.role.startswith(("policy", "critic"))]
        needed = sum(item.num_bytes for item in items)
        if needed > capacity:
            roles = ", ".join(f"{item.role} {item.num_bytes / _GIB:,.1f}" for item in items)
            return (
                f"{case.config.model.model_path} does not fit: weights, gradients and moments alone need "
                f"{needed / _GIB:,.1f} GiB ({roles}), and {case.hardware.name} has {capacity / _GIB:,.1f}"
            )
    return ""


def _case(job: TrainingJob, workload: Workload) -> Case:
    """Return the run on this machine, to plan for. Raises `ModelError`, `ConfigError`."""
    from sharpen.run.plan.case import Case, read_models
    from sharpen.run.plan.hardware import this_machine

    engine = None if job.engine is None else job.engine.type
    if engine is None and (
        job.workflow is not None or isinstance(job.recipe, RolloutRecipe)
    ):  # the engine is chosen later, on Ray
        engine = "vllm" if job.config.engine.type == "vllm" else "embedded"
    return Case(
        recipe=job.recipe,
        models=read_models(job.recipe),
        hardware=this_machine(job.config.engine.device),
        workload=workload,
        engine=engine,
    )


def _warnings(found: Plan) -> Iterator[str]:
    for place in found.places:
        if not place.fits:
            yield (
                f"  ! memory may be short: {place.name} may need {place.peak / _GIB:,.1f} GiB and has "
                f"{place.capacity / _GIB:,.1f} (`sharpen plan` shows which changes make it fit)"
            )
