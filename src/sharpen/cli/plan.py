"""`sharpen plan`: predict the memory of a run before anything starts, and compare a run with its plan.

In: a configuration file and the devices it is for, or a run directory. Out: tables of at most 80 columns. The exit code
is 0 if the run fits and 1 if it does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sharpen.cli.arguments import add_config_file, add_json, add_root, add_set, add_stage, print_json, say
from sharpen.errors import ConfigError, ModelError
from sharpen.screen import fitted, text_width

if TYPE_CHECKING:
    from sharpen.config.run import RunConfig
    from sharpen.learning.recipe import EngineType
    from sharpen.run.plan.hardware import Hardware
    from sharpen.run.plan.memory import DeviceMemory
    from sharpen.run.plan.predict import Plan
    from sharpen.run.plan.record import Comparison
    from sharpen.run.plan.workload import Workload

WIDTH = 80
"""Columns of the tables, where the screen has as many."""
_GIB = 2**30


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    what = parser.add_mutually_exclusive_group()
    add_config_file(what)
    parser.set_defaults(takes_default=True)
    what.add_argument("--run", metavar="RUN", help="instead: compare this run (a directory or a name) with its plan")
    add_root(parser)
    add_set(parser, "trainer.dtype=float32")
    add_stage(parser)
    parser.add_argument("--gpu", metavar="NAME", help="GPU to plan for, e.g. H100 (default: this machine)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: 1, or this machine's)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="memory of one GPU, e.g. 24GB (default: that of --gpu)")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="mean length of a prompt")
    parser.add_argument("--answer-tokens", type=int, metavar="N", help="mean number of sampled tokens of a rollout")
    parser.add_argument("--like", metavar="RUN", help="use the lengths of this run")
    add_json(parser)


def run_plan(arguments: argparse.Namespace, out: IO[str] | None = None) -> int:
    """Print a plan, or its comparison with the run. Raises `ConfigError`, `ModelError` for bad input."""
    out = out or sys.stdout
    if arguments.run is not None:
        from sharpen.run.found import find_run

        _refuse_options(arguments)
        return _print_comparison(find_run(arguments.run, arguments.root), as_json=arguments.json, out=out)
    plan, said = _make_plan(arguments)
    if arguments.json:
        from sharpen.run.plan.predict import plain_settings

        print_json({**plan.to_json(), "suggestion": plain_settings(plan.suggestion or {})}, out)
        return 0 if plan.fits else 1
    for line in plan_lines(plan, min(WIDTH, text_width(out)), said):
        say(line, file=out)
    return 0 if plan.fits else 1


def _refuse_options(arguments: argparse.Namespace) -> None:
    """Refuse options that have no effect for a run that has ended."""
    names = ("gpu", "gpus", "gpu_memory", "prompt_tokens", "answer_tokens", "like")
    options = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]
    if options or arguments.set:
        raise ConfigError(f"{(options or ['--set'])[0]} has no effect with --run, which reads an existing plan")


def _make_plan(arguments: argparse.Namespace) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan, with the settings that the run would choose, and lines that say which, and why the time of a
    step could not be measured."""
    from sharpen.compat.files import load_config
    from sharpen.config.load import parse_assignments, resolve
    from sharpen.learning.recipe import recipe_of
    from sharpen.run.plan.case import Case, read_models
    from sharpen.run.plan.fit import fit
    from sharpen.run.plan.hardware import chosen_hardware, this_machine
    from sharpen.run.plan.predict import plan, step_time

    chosen = chosen_hardware(arguments.gpu, arguments.gpus, arguments.gpu_memory)
    file = load_config(arguments.config, stage=arguments.stage, has_ray=True)
    config = resolve(file, parse_assignments(arguments.set), {}).config
    recipe = recipe_of(config)
    models, workload = read_models(recipe), _workload(arguments, config)
    hardware = chosen or this_machine(config.engine.device)
    engine = _engine(config, hardware)
    fitted = fit(Case(recipe=recipe, models=models, hardware=hardware, workload=workload, engine=engine))
    config = fitted.case.config
    project = Path(config.checkpoint_root_dir) / config.project
    found, failed = plan(fitted.case), ""
    if found.fits:
        try:
            found = replace(found, time=step_time(fitted.case, project.iterdir() if project.is_dir() else ()))
        except ModelError as error:
            failed = f"no forecast of a step's time: {error}"
    return found, tuple(filter(None, [fitted.line(found.places), fitted.warning(), failed]))


def _engine(config: RunConfig, hardware: Hardware) -> EngineType | None:
    """Return the engine that would serve on these devices."""
    from sharpen.learning.algorithm.supervised import learns_from_rows
    from sharpen.placement.engine_choice import installed_builds

    if learns_from_rows(config.algorithm) and config.workflow is None and config.environment is None:
        return None
    if config.engine.type != "auto":
        return config.engine.type
    wants_vllm = config.model.tensor_parallel_size > 1 or bool(installed_builds())
    return "vllm" if hardware.kind == "cuda" and wants_vllm and not config.deterministic else "embedded"


def _workload(arguments: argparse.Namespace, config: RunConfig) -> Workload:
    from sharpen.run.found import find_run
    from sharpen.run.plan.workload import expected, of_run

    if arguments.like is None:
        return expected(config, arguments.prompt_tokens, arguments.answer_tokens)
    if arguments.prompt_tokens is not None or arguments.answer_tokens is not None:
        raise ConfigError("--like cannot be combined with --prompt-tokens or --answer-tokens")
    workload = of_run(config, find_run(arguments.like, arguments.root))
    if workload is None:
        raise ConfigError(f"--like {arguments.like}: this directory has no trained step")
    return workload


def plan_lines(plan: Plan, width: int = WIDTH, said: Sequence[str] = ()) -> Iterator[str]:
    """Yield the plan as text, `width` columns wide. `said`: what making it had to say."""
    from sharpen.placement.model_formats import local_formats
    from sharpen.run.plan.predict import assumptions

    config, hardware, sizes = plan.case.config, plan.case.hardware, plan.case.models.policy
    devices = f"{hardware.count} x {hardware.name}" if hardware.kind == "cuda" else hardware.name
    yield from _wrapped(
        f"{config.algorithm.algorithm_type} with {config.model.model_path} ({sizes.parameters:,} parameters) on "
        f"{devices}, {_gib(hardware.memory_bytes)} GiB{' free' if hardware.kind == 'cpu' else ''}",
        width,
    )
    for line in (*local_formats(config.model), *said):
        yield from _wrapped(line, width)
    for place in plan.places:
        yield ""
        yield from _place_lines(place, width)
    yield ""
    yield from _time_lines(plan, width)
    yield "assumed"
    for assumption in assumptions(plan.case):
        yield from _wrapped(assumption, width, "  ")
    yield ""
    yield from _verdict(plan)


def _place_lines(place: DeviceMemory, width: int) -> Iterator[str]:
    from sharpen.run.plan.memory import ERROR

    yield _row(f"{place.name}{f', each of {place.count}' if place.count > 1 else ''}", "GiB", width)
    for when, heading in (
        ("always", ""),
        ("loading", "while loading"),
        ("comparing", "while gradients are compared"),
        ("scoring", "while the reference scores"),
        ("training", "while training"),
        ("generating", "while generating"),
        ("syncing", "while new weights are sent to the engine"),
    ):
        items = [item for item in place.items if item.when == when]
        if items and heading:
            yield f"  {heading}"
        for item in items:
            yield _row(f"  {'  ' if heading else ''}{item.role}", _gib(item.num_bytes), width)
    yield _row(f"  peak, ±{ERROR:.0%}", _gib(place.peak), width)


def _time_lines(plan: Plan, width: int) -> Iterator[str]:
    if not plan.fits:
        return
    if plan.time is None:
        yield "time of a step: unknown until a run with these settings has measured it"
        return
    yield from _wrapped(plan.time.line(plan.case.config.train_dataset.total_steps), width)


def _verdict(plan: Plan) -> Iterator[str]:
    from sharpen.run.plan.memory import ERROR
    from sharpen.run.plan.predict import plain_settings

    if plan.fits:
        least = min(plan.places, key=lambda place: place.capacity - place.peak)
        spare = least.capacity - least.peak
        unsure = ", less than the error of the plan" if spare < ERROR * least.peak else ""
        yield f"it fits, with {_gib(spare)} GiB to spare{unsure}"
        return
    if plan.missing_devices:
        here = plan.case.hardware.count
        yield f"it does not fit: it needs {here + plan.missing_devices} GPUs, but there are {here}"
    for place in plan.places:
        if not place.fits:
            yield (
                f"it does not fit: {place.name} needs {_gib(place.peak)} GiB, {_gib(place.peak - place.capacity)} more "
                "than there is"
            )
    if plan.suggestion is None:
        yield "no change of settings makes it fit: use larger devices or a smaller model"
        return
    yield "the smallest change that makes it fit:"
    for name, value in plain_settings(plan.suggestion).items():
        yield f"  {name}: {json.dumps(value)}"


def _print_comparison(run_dir: Path, *, as_json: bool, out: IO[str]) -> int:
    from sharpen.run.plan.record import compare, read_plan

    content = read_plan(run_dir)
    if as_json:
        print_json(content, out)
        return 0
    for line in comparison_lines(run_dir, compare(content), min(WIDTH, text_width(out))):
        say(line, file=out)
    return 0


def comparison_lines(run_dir: Path, comparisons: list[Comparison], width: int = WIDTH) -> Iterator[str]:
    """Yield the table of predicted and measured values, `width` columns wide."""
    yield from _wrapped(f"plan of {run_dir}", width)
    yield ""
    yield _columns(width, "", "before", "lengths known" if width >= WIDTH else "known", "measured", "error")
    for item in comparisons:
        numbers = (_number(value) for value in (item.before, item.known, item.measured))
        yield _columns(
            width, f"{item.name}, {item.unit}", *numbers, "-" if item.error is None else f"{item.error:+.1%}"
        )
    yield ""
    yield from _wrapped(
        "before: predicted from the lengths assumed before the run; lengths known: predicted from the actual lengths; "
        "error: of the latter (of the former if there is no other)",
        width,
    )


def _columns(width: int, *cells: str) -> str:
    first, *rest = cells
    each = max(9, (width - 20) // len(rest))
    return (f"{first:<20}" + "".join(f"{cell:>{each}}" for cell in rest)).rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row(name: str, value: str, width: int) -> str:
    return f"{name:<{width - 10}}{value:>10}"


def _gib(num_bytes: int) -> str:
    gib = num_bytes / _GIB
    return f"{gib:,.1f}" if gib >= 1 else f"{gib:.2f}"


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return fitted(f"{indent}{text}", width)
