"""`sharpen explain`: every resolved value of a configuration, and its origin.

In: a `ResolvedConfig`. Out: a table on a terminal, as wide as it; elsewhere one line for each setting, for
searching. For settings that are not given it shows the effective value and its origin. Overrides, notices
and the formats of a model that is here follow at the end, and the reason if the run would be refused.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from sharpen.cli.arguments import add_config, add_json, print_json, resolve_config, say
from sharpen.cli.page import open_console, print_wrapped
from sharpen.config.run import DistillConfig, ExpertConfig, LossConfig, RunConfig
from sharpen.errors import ConfigError, ModelError
from sharpen.learning.algorithm.presets import Algorithm, algorithm_named
from sharpen.learning.algorithm.resolve import TIGHT_CLIP
from sharpen.learning.algorithm.supervised import SupervisedAlgorithm
from sharpen.learning.recipe import RolloutRecipe, RowRecipe, TrainingRecipe, recipe_of
from sharpen.screen import text_width

if TYPE_CHECKING:
    from sharpen.config.load import ResolvedConfig


# The effective values of settings that are not given: from the algorithm's preset, from other settings, or from the run
# when it starts.
#
# In: a run's configuration. Out: for settings that are null (and parameters of the algorithm without a setting of their
# own) the effective value and its origin. Any other null means what the documentation of the setting says: no limit, or
# not present.

Effective = tuple[Any, str]
"""The effective value, and its origin."""
_LOSS = ("clip_low", "clip_high", "dual_clip")
_ADVANTAGE = ("std_normalize", "step_norm")


def effective(config: RunConfig) -> dict[str, Effective]:
    """Return the effective values by dotted name. Raises `ConfigError` for settings that the algorithm refuses."""
    recipe = recipe_of(config)
    if isinstance(recipe, RowRecipe):
        values = dict(_of_supervised(recipe.algorithm))
    else:
        values = {**dict(_of_algorithm(recipe.algorithm, config)), **dict(_of_rollouts(recipe))}
    return {**values, **dict(_of_run(recipe))}


def _of_algorithm(algorithm: Algorithm, config: RunConfig) -> Iterator[tuple[str, Effective]]:
    """Yield the values of section `loss`, and the other values that a preset sets."""
    preset, given_loss = f"preset {algorithm.name}", config.loss
    for part in ("advantage", "policy_loss", "kl", "entropy_coef", "aggregation"):
        yield f"loss.{part}", (getattr(algorithm, part), preset)
    own_behaviour = algorithm_named(algorithm.name).behaviour == algorithm.behaviour
    yield "loss.behaviour", (algorithm.behaviour, preset if own_behaviour else f"a clip below {TIGHT_CLIP:g}")
    yield "loss.kl_coef", (algorithm.kl_coef, "loss.kl none" if given_loss.kl == "none" else preset)
    advantage, loss = algorithm.of_advantage.configured, algorithm.of_policy_loss.configured
    for part, own, function, configured in (
        ("advantage", _ADVANTAGE, advantage, algorithm.advantage_args),
        ("policy_loss", _LOSS, loss, algorithm.policy_loss_args),
    ):
        name, parameters = getattr(algorithm, part), _parameters(function, configured)
        origin = preset if getattr(given_loss, part) is None else f"loss.{part} {name}"
        for setting in own:
            absent = (None, f"no parameter of loss.{part} {name}")
            yield f"loss.{setting}", (parameters.pop(setting), origin) if setting in parameters else absent
        for parameter, value in parameters.items():
            yield f"loss.{part}_args.{parameter}", (value, origin)
    no_kl = "no KL term"
    adapts = "kl_coef is constant" if algorithm.needs_reference else no_kl
    yield "loss.kl_in", (algorithm.kl_in, preset) if algorithm.needs_reference else (None, no_kl)
    yield "loss.kl_target", (algorithm.kl_target, preset if algorithm.kl_target is not None else adapts)
    yield "loss.kl_horizon", (algorithm.kl_horizon, preset) if algorithm.kl_target is not None else (None, adapts)
    for side in ("behaviour_low", "behaviour_high"):
        bound, correction = getattr(algorithm, side), f"loss.behaviour {algorithm.behaviour}"
        yield f"loss.{side}", (bound, correction if bound is not None else f"no parameter of {correction}")
    constant = algorithm.aggregation == "constant-length"
    origin = "model.max_tokens" if constant else f"no parameter of loss.aggregation {algorithm.aggregation}"
    yield "loss.constant_length", (algorithm.constant_length, origin)
    dropped = preset if algorithm.std_threshold is not None else f"{preset}: no group is dropped"
    yield "loss.std_threshold", (algorithm.std_threshold, dropped)
    yield "sampling.max_refill", (algorithm.max_refill, preset)
    expert, distill = algorithm.expert, algorithm.distill
    if expert is not None:
        for setting in ("mu", "phi"):
            yield f"expert.{setting}", (getattr(expert, setting), preset)
        yield "expert.mu_warmup_steps", (expert.mu_warmup_steps, preset)
        for setting in ("mu_decay_steps", "mu_valley"):
            yield f"expert.{setting}", (None, f"{preset}: mu is constant")
    if distill is not None:
        for setting in ("divergence", "coef"):
            yield f"distill.{setting}", (getattr(distill, setting), preset)
        mixes = distill.divergence == "js"
        absent = (None, f"no parameter of distill.divergence {distill.divergence}")
        yield "distill.beta", (distill.beta, preset) if mixes else absent
    for section, missing, settings in (
        ("expert", expert is None, ExpertConfig),
        ("distill", distill is None, DistillConfig),
    ):
        if missing:
            yield from ((f"{section}.{name}", (None, f"no part of {algorithm.name}")) for name in settings.model_fields)


def _of_rollouts(recipe: RolloutRecipe) -> Iterator[tuple[str, Effective]]:
    """Yield the values that other settings determine in a run with rollouts."""
    config, algorithm, replay = recipe.config, recipe.algorithm, recipe.replay
    shapes = config.sampling.overlong_cache is not None
    length = (algorithm.shaping.max_length, "model.max_tokens") if shapes else (None, "no overlong_cache")
    yield "sampling.overlong_length", length
    yield "sync.max_staleness", (recipe.schedule.max_staleness, "sync.style, interval and offset, in updates")
    replayed = (None, "no replay") if replay is None else (replay.max_staleness, "four steps' updates, plus sync's")
    yield "sampling.max_staleness", replayed
    if algorithm.expert is not None:
        yield "expert.batch_size", (config.algorithm.batch_size, "algorithm.batch_size")


def _of_supervised(algorithm: SupervisedAlgorithm) -> Iterator[tuple[str, Effective]]:
    preset, absent = f"preset {algorithm.name}", (None, f"no part of {algorithm.name}")
    for section, settings in (("loss", LossConfig), ("expert", ExpertConfig), ("distill", DistillConfig)):
        yield from ((f"{section}.{name}", absent) for name, field in settings.model_fields.items() if not field.default)
    for setting in ("sync.max_staleness", "sampling.max_staleness", "sampling.max_refill", "sampling.overlong_length"):
        yield setting, absent
    if algorithm.pair_loss is None:
        yield "loss.aggregation", (algorithm.aggregation, preset)
    else:
        yield "loss.kl", (algorithm.kl, preset)
        yield "loss.kl_coef", (algorithm.kl_coef, preset)
    for parameter, value in algorithm.pair_loss_args.items():
        yield f"loss.policy_loss_args.{parameter}", (value, preset)


def _of_run(recipe: TrainingRecipe) -> Iterator[tuple[str, Effective]]:
    """Yield the values that are set for every run, or when it starts."""
    config = recipe.config
    yield "name", (None, "Experiment-<time of the start>")
    yield "execution", ("ray" if config.uses_ray else "local", "whether the section cluster is given")
    yield "engine.kv_cache_mb", (None, "at the start: what max_slots needs, at most a quarter of the free memory")
    held_out = "a tenth of train_dataset, at most 512 tasks"
    if isinstance(recipe, RolloutRecipe):
        yield "eval_dataset", (None, held_out if config.evaluation.hold_out else "nothing is held out")


def _parameters(function: Callable[..., Any], configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword parameters of a function with their effective values."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: configured.get(p.name, p.default) for p in parameters if p.kind == p.KEYWORD_ONLY}


Row = tuple[str, str, str]
"""Name within the section, value as in YAML, origin."""


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config(parser)
    add_json(parser)


def run_explain(arguments: argparse.Namespace) -> int:
    """Print the settings of each stage of the file."""
    from sharpen.compat.files import load_stages
    from sharpen.compat.trinity.registry import check_names

    answers = []
    for file in load_stages(arguments.config, stage=arguments.stage):
        resolved = resolve_config(arguments, {}, file)
        if not arguments.json:  # before a name that there is not ends it
            explain(resolved)
        refusals = [f"this run would be refused: {refusal}" for refusal in check_names(resolved.config)]
        if arguments.json:
            answers.append({"stage": file.name, **_answer(resolved, refusals)})
        else:
            say("".join(f"{refusal}\n" for refusal in refusals), end="")
    if arguments.json:
        print_json(answers[0] if len(answers) == 1 else answers)
    return 0


def _answer(resolved: ResolvedConfig, refusals: list[str]) -> dict[str, Any]:
    """Return what `explain` prints, as JSON: the value and the origin of each setting by its dotted name."""
    defaults, formats, refused = _decided(resolved)
    settings = {
        f"{section}{'.' if section else ''}{name}": {"value": json.loads(value), "origin": origin}
        for section, rows in _sections(resolved, defaults)
        for name, value, origin in rows
    }
    lines = [*filter(None, (*resolved.overrides, *resolved.notices, *formats, refused)), *refusals]
    return {"settings": settings, "lines": lines}


def _decided(resolved: ResolvedConfig) -> tuple[Mapping[str, tuple[Any, str]], tuple[str, ...], str]:
    """Return the effective values, the model's formats, and the reason if the run would be refused."""
    from sharpen.placement.model_formats import local_formats

    try:
        return effective(resolved.config), local_formats(resolved.config.model), ""
    except (ConfigError, ModelError) as error:
        return {}, (), f"this run would be refused: {error}"


def explain(resolved: ResolvedConfig, out: IO[str] | None = None) -> None:
    """Print all values in the configuration's own order, by section."""
    out = out or sys.stdout
    defaults, formats, refused = _decided(resolved)
    sections = dict(_sections(resolved, defaults))
    if out.isatty():
        _print_table(sections, resolved.file, out)
    else:
        for section, rows in sections.items():
            for name, value, origin in rows:
                say(f"{section}{'.' if section else ''}{name} = {value}  [{origin}]", file=out)
    console = open_console(out)
    for line in filter(None, (*resolved.overrides, *resolved.notices, *formats, refused)):
        if out.isatty():
            print_wrapped(console, line)
        else:
            say(line, file=out)


def _sections(resolved: ResolvedConfig, defaults: Mapping[str, tuple[Any, str]]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the settings of the run itself, then those of each section; `defaults` fills in what is not given."""
    from sharpen.config.load import shown_settings

    values = shown_settings(resolved.config)
    shown = {key: (value, resolved.origins[key]) for key, value in values.items()}
    shown |= {
        key: default
        for key, default in defaults.items()
        if values.get(key) is None and not _is_given_section(key, values)
    }
    rows: dict[str, list[Row]] = {"": []}
    for key, (value, origin) in shown.items():
        section, _, name = key.partition(".") if "." in key else ("", "", key)
        rows.setdefault(section, []).append((name, json.dumps(value, ensure_ascii=False), origin))
    yield from rows.items()


def _is_given_section(key: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key is a section with given settings (`eval_dataset.path`)."""
    return any(name.startswith(f"{key}.") for name in values)


def _print_table(sections: dict[str, list[Row]], file: str, out: IO[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sharpen.agent.transcript import clean

    console = Console(file=out, width=text_width(out))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("setting", overflow="fold", max_width=25)
    table.add_column("value", overflow="fold", max_width=20)
    table.add_column(f"from ({file})" if file else "from", overflow="fold")
    for section, rows in sections.items():
        if section:
            table.add_row(Text(section, style="bold"), "", "")
        for name, value, origin in rows:
            style = "dim" if origin == "default" else ""
            shown = origin.removeprefix(f"{file}: ") if file else origin
            cells = (f"  {name}" if section else name, value, shown)
            table.add_row(*(Text(clean(cell), style=style) for cell in cells))
    console.print(table)
