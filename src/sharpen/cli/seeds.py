"""`sharpen seeds --config F --seeds 0,1,2`: the same run with several seeds, and what they have in common.

In: a configuration file, seeds. Out: a line for each seed, then means with intervals over the seeds. The exit code is 1
if a run failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sharpen.cli.arguments import add_config, add_json, print_json, resolve_config, say
from sharpen.errors import ConfigError

if TYPE_CHECKING:
    from sharpen.beyond.several import Spread, Train, Trained

MODES = ("sampled", "greedy")


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config(parser)
    parser.add_argument("--seeds", type=_seeds, required=True, metavar="N,N,...", help="seeds, such as 0,1,2")
    add_json(parser)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas, such as 0,1,2; got {text!r}") from None
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"a seed is there twice: {text}")
    return seeds


def run_seeds(arguments: argparse.Namespace, train: Train | None = None) -> int:
    """Train with each seed, one after the other. Raises `ConfigError` for a file that cannot be used."""
    from sharpen.beyond.several import base_name, trainer

    resolved = resolve_config(arguments, {})
    for seed in arguments.seeds:  # all of them before the first run
        resolve_config(arguments, {"seed": seed})
    base = base_name(arguments.config, resolved.config.name)
    train = train or trainer(config_options(arguments))
    done = []
    for number, seed in enumerate(arguments.seeds, 1):
        say(f"seed {seed} ({number} of {len(arguments.seeds)})", file=sys.stderr)
        done.append(train(f"{base}-seed-{seed}", {"seed": seed}))
    whole = [one for one in done if one.code == 0]
    if not whole:
        raise ConfigError(f"no run with these seeds ended well; the first one ended with exit code {done[0].code}")
    found = spreads(whole)
    if arguments.json:
        print_json({"runs": [_as_json(one) for one in done], "spread": {k: v and asdict(v) for k, v in found.items()}})
    else:
        for line in lines(done, found):
            say(line)
    return 0 if len(whole) == len(done) else 1


def config_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options of `--config` and what belongs to it, as they were given."""
    options = ["--config", str(arguments.config)]
    for assignment in arguments.set:
        options += ["--set", assignment]
    if arguments.stage is not None:
        options += ["--stage", arguments.stage]
    for folder in arguments.plugin_dir or []:
        options += ["--plugin-dir", str(folder)]
    return [*options, *(["--trinity-imports"] if arguments.trinity_imports else [])]


def spreads(done: Sequence[Trained]) -> dict[str, Spread | None]:
    """Return the means over the runs by what was measured: gain, before and after in each mode."""
    from sharpen.beyond.several import spread

    values: dict[str, list[float | None]] = {"gain": [one.gain for one in done]}
    for mode in MODES:
        for when in ("before", "after"):
            values[f"{mode} {when}"] = [one.accuracy(when, mode) for one in done]
    known = {name: [value for value in some if value is not None] for name, some in values.items()}
    return {name: spread(some) for name, some in known.items() if some or name == "gain"}


def lines(done: Sequence[Trained], found: Mapping[str, Spread | None]) -> Iterator[str]:
    """Yield a line for each run, and one for each mean."""
    from sharpen.show.monitor.figures import number, with_ends

    for one in done:
        if one.code:
            yield f"seed {one.settings['seed']}: failed with exit code {one.code}"
            continue
        verdict = (one.summary.get("verdict") or {}).get("text", "no verdict")
        yield f"seed {one.settings['seed']}: {verdict}  ({one.run_dir})"
    yield ""
    for name, mean in found.items():
        if mean is None:
            yield f"{name}: not measured"
        elif mean.low is None or mean.high is None:
            yield f"{name}: {number(mean.mean)} (one run has no interval)"
        else:
            deviation = number(mean.deviation or 0.0)
            shown = with_ends(mean.mean, mean.low, mean.high, unit="run")
            yield f"{name}: {shown} ({mean.count} runs, deviation {deviation})"
    yield ""
    yield "in brackets: 95% intervals over seeds (Student's); tasks and model are the same in all of them"


def _as_json(one: Trained) -> dict[str, Any]:
    return {"name": one.name, **one.settings, "exit_code": one.code, "gain": one.gain, "summary": one.summary}
