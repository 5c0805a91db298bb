"""`sharpen sweep --config F --vary KEY=A,B --trials N`: search the settings with which a run gains most.

In: a configuration file, what to vary. Out: the trials, the best first, with the command that runs the best one again
with other seeds. The exit code is 1 if no trial gave a result.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sharpen.cli.arguments import add_config, add_json, count, print_json, resolve_config, say
from sharpen.cli.seeds import config_options
from sharpen.errors import ConfigError

if TYPE_CHECKING:
    from sharpen.beyond.several import Settings, Train, Trained


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config(parser)
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="KEY=RANGE",
        help="a setting to search: KEY=A,B,C or KEY=LOW:HIGH or KEY=LOW:HIGH:log; may be given more than once",
    )
    parser.add_argument("--trials", type=count, default=8, metavar="N", help="number of runs (default: 8)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the search (default: 0)")
    add_json(parser)


def _seed(text: str) -> int:
    """Parse a seed, as Optuna's sampler takes it."""
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must be from 0 to {2**32 - 1}, got {value}")
    return value


def run_sweep(arguments: argparse.Namespace, train: Train | None = None) -> int:
    """Run the trials. Raises `ConfigError` for a file, a range or an installation that cannot be used."""
    from sharpen.beyond.several import base_name, trainer
    from sharpen.beyond.sweep import parse_range, sweep

    ranges = [parse_range(text) for text in arguments.vary]
    names = [one.setting for one in ranges]
    if len(set(names)) < len(names):
        raise ConfigError(f"--vary names a setting twice: {', '.join(names)}")
    resolved = resolve_config(arguments, {one.setting: one.example for one in ranges})
    train = train or trainer(config_options(arguments))

    def told(name: str, settings: Settings) -> Trained:
        say(f"{name}: {_shown(settings)}", file=sys.stderr)
        return train(name, settings)

    base = base_name(arguments.config, resolved.config.name)
    done = sweep(ranges, told, base=base, trials=arguments.trials, seed=arguments.seed)
    if arguments.json:
        trials = [{"name": t.name, "settings": t.settings, "gain": t.gain, "run_dir": t.run_dir} for t in done]
        print_json({"trials": trials})
    else:
        for line in lines(arguments, done):
            say(line)
    return 0 if done[0].gain is not None else 1


def lines(arguments: argparse.Namespace, done: Sequence[Trained]) -> Iterator[str]:
    """Yield the trials, and what to do next."""
    from sharpen.show.monitor.figures import number

    for one in done:
        if one.gain is not None:
            gain = number(one.gain, sign=True)
        else:
            gain = f"failed ({one.code})" if one.code else "no verdict"
        yield f"{gain:>12}  {one.name}  {_shown(one.settings)}"
    if done[0].gain is None:
        yield "\nno trial was measured: each run needs held-out tasks (eval_dataset)"
        return
    command = ["sharpen", "seeds", *config_options(arguments)]
    command += [word for key, value in done[0].settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    yield f"\nthe best of {len(done)} trials is best partly by luck: run it with other seeds\n"
    yield f"  {shlex.join(command)} --seeds 0,1,2"


def _shown(settings: Settings) -> str:
    texts = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in settings.items()}
    return ", ".join(f"{key}={text}" for key, text in texts.items())
