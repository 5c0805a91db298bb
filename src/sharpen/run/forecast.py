"""The plan of a run's memory and time: made before anything is loaded, compared with the measurements at its end.

In: the job of a run, and its directory. Out: the job with the settings that were left open, lines for the user and
`plan.json`; `ConfigError` if memory is too short, with the smallest change that helps. A model that cannot be planned
is trained as it is.

The whole plan takes about half a second, once a run; some seconds where several settings have to be tried.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError, ModelError
from sharpen.learning.recipe import RolloutRecipe, TrainingJob
from sharpen.run.decide import served_adapters
from sharpen.show.monitor.summary import peak_memory_mb

if TYPE_CHECKING:
    from sharpen.run.plan.case import Case
    from sharpen.run.plan.predict import Plan
    from sharpen.run.plan.workload import Workload

LEAST_PARAMETERS = 1_000_000
"""A smaller model gets no plan: most of its memory is that of Python and its libraries."""
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A job whose settings fit, as far as that can be known. `chosen` are the settings that were left open (by dotted
    name), `plan` is None for a model without a plan, and `lines` are for the user."""

    job: TrainingJob
    chosen: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    lines: tuple[str, ...] = ()

    def begin(self, run_dir: Path) -> Iterator[str]:
        """Write the plan into the directory of the run that is about to start, and yield the lines; also the time of a
        step, if an earlier run or a copy of two layers can tell."""
        from sharpen.run.plan.predict import step_time
        from sharpen.run.plan.record import write_plan

        if self.plan is not None:
            time = None
            try:
                time = step_time(self.plan.case, run_dir.parent.iterdir())
            except ModelError as error:
                yield f"no forecast of a step's time: {error}"
            if time is not None:
                yield time.line(self.job.config.train_dataset.total_steps)
            write_plan(run_dir, {"before": replace(self.plan, time=time).to_json()})
        yield from self.lines


def settle(job: TrainingJob, before: Mapping[str, Any] | None = None, evaluated: int | None = None) -> Forecast:
    """Choose the settings that were left open. `before`: those that the run chose when it began, if it continues.
    `evaluated`: the tasks of its largest evaluation, if they were counted. Raises `ConfigError` if memory is too short
    by more than the plan may be wrong."""
    from sharpen.run.plan.fit import fit
    from sharpen.run.plan.predict import advice, find_change, plan
    from sharpen.run.plan.workload import expected

    try:
        case = _case(job, replace(expected(job.config), evaluated=evaluated))
        if case.models.policy.parameters < LEAST_PARAMETERS:
            return Forecast(job=job)
        if job.config.uses_ray:
            return Forecast(job=job, plan=plan(case, suggests=False))
        fitted = fit(case, before)
        if reason := too_large(fitted.case):
            raise ConfigError(f"{reason}. {advice(find_change(fitted.case))}")
        found = plan(fitted.case, suggests=False)
    except ModelError as error:
        return Forecast(job=job, lines=(f"no plan of this run's memory: {error}",))
    config = fitted.case.config
    return Forecast(
        job=job.changed(config, served_adapters(config, job.engine, trains=True)),
        chosen=fitted.chosen,
        plan=found,
        lines=(*filter(None, [fitted.line(found.places), fitted.warning()]), *_warnings(found)),
    )


def after_run(job: TrainingJob, run_dir: Path) -> Iterator[str]:
    """Add the measurements to the plan of a run that has ended, and yield a line with the plan's error; nothing for a
    run without a plan."""
    from sharpen.run.plan.predict import computed_step_time, plan
    from sharpen.run.plan.record import FILE, add_outcome, read_plan, sentence
    from sharpen.run.plan.speed import Speed
    from sharpen.run.plan.workload import metrics_of, of_run

    if not (run_dir / FILE).exists():
        return
    known, lengths = None, of_run(job.config, run_dir)
    if lengths is not None:
        before = read_plan(run_dir)["before"]
        capacity = before["places"][0]["capacity_mb"] * 2**20  # the run itself takes some now
        with contextlib.suppress(ModelError):  # the model's folder may be gone
            case = _case(job, replace(lengths, evaluated=before.get("evaluated")))
            hardware = replace(case.hardware, memory_bytes=capacity)
            speed = before.get("speed")
            time = None if speed is None else computed_step_time(case, Speed(**speed))
            known = plan(replace(case, hardware=hardware), time=time, suggests=False).to_json()
    steps = [float(row["time/step_s"]) for row in metrics_of(run_dir) if "time/step_s" in row]
    yield sentence(add_outcome(run_dir, known, steps, measured_mb(job.config)))


def measured_mb(config: RunConfig) -> float | None:
    """Return the peak memory of this process in MiB: on the GPU it trains on, else on the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and config.engine.device != "cpu" and torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    return peak_memory_mb()


def too_large(case: Case) -> str:
    """Return a sentence if the run cannot fit, else an empty string. On a CPU with the embedded engine: the plan is
    more than the free memory, by more than its error. Elsewhere: weights, gradients and moments alone are more."""
    from sharpen.run.plan.memory import ERROR, places

    is_judged = case.on_cpu and not case.vllm
    for certain in (True, False) if is_judged else (True,):  # the first is known at once
        for place in places(case, certain=certain):
            if place.peak > place.capacity * (1 + ERROR if is_judged else 1):
                roles = ", ".join(f"{item.role} {item.num_bytes / _GIB:,.1f}" for item in place.items)
                needs = "weights, gradients and moments alone need" if certain else "it needs about"
                return (
                    f"{case.config.model.model_path} does not fit: {needs} {place.peak / _GIB:,.1f} GiB ({roles}), and "
                    f"{case.hardware.name} has {place.capacity / _GIB:,.1f}{' free' if case.on_cpu else ''}"
                )
    return ""


def _case(job: TrainingJob, workload: Workload) -> Case:
    """Return the run on this machine, to plan for. Raises `ModelError`, `ConfigError`."""
    from sharpen.run.plan.case import Case, read_models
    from sharpen.run.plan.hardware import this_machine

    engine = None if job.engine is None else job.engine.type
    serves = job.workflow is not None or (isinstance(job.recipe, RolloutRecipe) and job.config.mode != "train")
    if engine is None and serves:  # the engine is chosen later, on Ray
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
