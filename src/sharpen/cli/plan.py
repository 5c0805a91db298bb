"""`sharpen plan`: what memory a run will take, before anything starts; and how a run's plan came true.

In: a configuration file and the devices it is for, or the directory of a run. Out: tables that fit 80 columns. The exit
code is 0 where it fits and 1 where it does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sharpen.errors import ConfigError

if TYPE_CHECKING:
    from sharpen.config.run import RunConfig
    from sharpen.plan.hardware import Hardware
    from sharpen.plan.memory import DeviceMemory
    from sharpen.plan.predict import Plan
    from sharpen.plan.record import Comparison
    from sharpen.plan.workload import Workload
    from sharpen.recipe import EngineType

WIDTH = 80
_GIB = 2**30


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML; ours or Trinity-RFT's)")
    what.add_argument("--run", type=Path, metavar="RUN_DIR", help="instead: how the plan of this run came true")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one setting, e.g. trainer.dtype=float32",
    )
    parser.add_argument("--gpu", metavar="NAME", help="GPU to plan for, e.g. H100 (default: this machine)")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many of them there are (default: 1, or those here)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="memory of one, e.g. 24GB (default: the GPU's)")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="mean length of a prompt")
    parser.add_argument("--answer-tokens", type=int, metavar="N", help="mean number of sampled tokens of a rollout")
    parser.add_argument("--like", type=Path, metavar="RUN_DIR", help="take the lengths that this run had")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run_plan(arguments: argparse.Namespace, out: IO[str] | None = None) -> int:
    """Print a plan, or how one came true. Raises `ConfigError`, `ModelError` for bad input."""
    out = out or sys.stdout
    if arguments.run is not None:
        _refuse_options(arguments)
        return _print_comparison(arguments.run, as_json=arguments.json, out=out)
    found = _made(arguments)
    lines = plan_lines(found)
    if arguments.json:
        lines = iter([json.dumps({**found.to_json(), "suggestion": _plain_settings(found)}, indent=2)])
    for line in lines:
        print(line, file=out)
    return 0 if found.fits else 1


def _refuse_options(arguments: argparse.Namespace) -> None:
    """Those that mean nothing for a run that has ended."""
    names = ("gpu", "gpus", "gpu_memory", "prompt_tokens", "answer_tokens", "like")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]
    if given or arguments.set:
        raise ConfigError(f"{(given or ['--set'])[0]} has no effect with --run, which reads a plan that was made")


def _made(arguments: argparse.Namespace) -> Plan:
    from sharpen.compat.files import load_config
    from sharpen.config.load import parse_assignments, resolve
    from sharpen.plan.case import Case, read_models
    from sharpen.plan.hardware import chosen_hardware, this_machine
    from sharpen.plan.predict import plan
    from sharpen.plan.timing import of_last_run
    from sharpen.recipe import recipe_of

    given = chosen_hardware(arguments.gpu, arguments.gpus, arguments.gpu_memory)
    config = resolve(load_config(arguments.config), parse_assignments(arguments.set), {}).config
    recipe = recipe_of(config)
    models, workload = read_models(recipe), _workload(arguments, config)
    hardware = given or this_machine(config.engine.device)
    engine = _engine(config, hardware)
    project = Path(config.checkpoint_root_dir) / config.project
    time = of_last_run(config, hardware, project.iterdir() if project.is_dir() else ())
    return plan(Case(recipe=recipe, models=models, hardware=hardware, workload=workload, engine=engine), time=time)


def _engine(config: RunConfig, hardware: Hardware) -> EngineType | None:
    """Which engine would serve on those devices."""
    from sharpen.algorithm.supervised import learns_from_rows
    from sharpen.execution.engine_choice import installed_builds

    if learns_from_rows(config) and config.workflow is None:
        return None
    if config.engine.type != "auto":
        return config.engine.type
    wants_vllm = config.model.tensor_parallel_size > 1 or bool(installed_builds())
    return "vllm" if hardware.kind == "cuda" and wants_vllm and not config.deterministic else "embedded"


def _workload(arguments: argparse.Namespace, config: RunConfig) -> Workload:
    from sharpen.plan.workload import expected, of_run

    if arguments.like is None:
        return expected(config, arguments.prompt_tokens, arguments.answer_tokens)
    if arguments.prompt_tokens is not None or arguments.answer_tokens is not None:
        raise ConfigError("--like and lengths given by hand exclude each other")
    found = of_run(config, arguments.like)
    if found is None:
        raise ConfigError(f"--like {arguments.like}: no step of a run was trained there")
    return found


def plan_lines(found: Plan) -> Iterator[str]:
    """The plan as text."""
    from sharpen.plan.predict import assumptions

    config, hardware, sizes = found.case.config, found.case.hardware, found.case.models.policy
    devices = f"{hardware.count} x {hardware.name}" if hardware.kind == "cuda" else hardware.name
    yield from _wrapped(
        f"{config.algorithm.algorithm_type} with {config.model.model_path} ({sizes.parameters:,} parameters) on "
        f"{devices}, {_gib(hardware.memory_bytes)} GiB{' free' if hardware.kind == 'cpu' else ''}"
    )
    for place in found.places:
        yield ""
        yield from _place_lines(place)
    yield ""
    yield from _time_lines(found)
    yield "assumed"
    for assumption in assumptions(found.case):
        yield from _wrapped(assumption, "  ")
    yield ""
    yield from _verdict(found)


def _place_lines(place: DeviceMemory) -> Iterator[str]:
    from sharpen.plan.memory import ERROR

    yield _row(f"{place.name}{f', each of {place.count}' if place.count > 1 else ''}", "GiB")
    for when, heading in (
        ("always", ""),
        ("loading", "while loading"),
        ("training", "while training"),
        ("generating", "while generating"),
        ("syncing", "while new weights go to the engine"),
    ):
        items = [item for item in place.items if item.when == when]
        if items and heading:
            yield f"  {heading}"
        for item in items:
            yield _row(f"  {'  ' if heading else ''}{item.role}", _gib(item.num_bytes))
    yield _row(f"  at its fullest, ±{ERROR:.0%}", _gib(place.peak))


def _time_lines(found: Plan) -> Iterator[str]:
    if found.time is None:
        yield "time of a step: known once a run of these settings has measured it"
        return
    seconds, steps = found.time.seconds, found.case.config.train_dataset.total_steps
    whole = f", {steps:,} steps {_number(steps * seconds / 60)} minutes" if steps else ""
    yield from _wrapped(f"a step takes {_number(seconds)} s{whole} ({found.time.source})")


def _verdict(found: Plan) -> Iterator[str]:
    from sharpen.plan.memory import ERROR

    if found.fits:
        least = min(found.places, key=lambda place: place.capacity - place.peak)
        spare = least.capacity - least.peak
        unsure = ", less than what the plan may be wrong by" if spare < ERROR * least.peak else ""
        yield f"it fits, with {_gib(spare)} GiB to spare{unsure}"
        return
    if found.missing_devices:
        here = found.case.hardware.count
        yield f"it does not fit: {here + found.missing_devices} GPUs are needed, {here} would be there"
    for place in found.places:
        if not place.fits:
            yield (
                f"it does not fit: {place.name} needs {_gib(place.peak)} GiB, {_gib(place.peak - place.capacity)} more "
                "than there is"
            )
    if found.suggestion is None:
        yield "no change of the settings that are tried makes it fit: take larger devices, or a smaller model"
        return
    yield "the smallest change with which it fits:"
    for name, value in _plain_settings(found).items():
        yield f"  {name}: {json.dumps(value)}"


def _plain_settings(found: Plan) -> dict[str, Any]:
    """The suggested settings as they are written in a file."""
    settings = (found.suggestion or {}).items()
    return {name: {"rank": value.rank} if name == "trainer.lora" else value for name, value in settings}


def _print_comparison(run_dir: Path, *, as_json: bool, out: IO[str]) -> int:
    from sharpen.plan.record import compare, read_plan

    content = read_plan(run_dir)
    if as_json:
        print(json.dumps(content, indent=2), file=out)
        return 0
    for line in comparison_lines(run_dir, compare(content)):
        print(line, file=out)
    return 0


def comparison_lines(run_dir: Path, found: list[Comparison]) -> Iterator[str]:
    """The table of predicted and measured."""
    yield from _wrapped(f"plan of {run_dir}")
    yield ""
    yield _columns("", "before", "lengths known", "measured", "error")
    for one in found:
        numbers = (_number(value) for value in (one.before, one.known, one.measured))
        yield _columns(f"{one.name}, {one.unit}", *numbers, "-" if one.error is None else f"{one.error:+.1%}")
    yield ""
    yield from _wrapped(
        "before: with the lengths assumed before the run; lengths known: with those that came; error: of the latter "
        "(of the former where there is none)"
    )


def _columns(*cells: str) -> str:
    first, *rest = cells
    return (f"{first:<20}" + "".join(f"{cell:>15}" for cell in rest)).rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row(name: str, value: str) -> str:
    return f"{name:<{WIDTH - 10}}{value:>10}"


def _gib(num_bytes: int) -> str:
    gib = num_bytes / _GIB
    return f"{gib:,.1f}" if gib >= 1 else f"{gib:.2f}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
