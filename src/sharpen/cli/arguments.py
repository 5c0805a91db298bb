"""Arguments that several commands have: the same flag with the same meaning in each of them.

In: a command's parser, or its parsed arguments. Out: the arguments, or what they name.

    RUN --root DIR                   add_run, run_of              a run's directory or name; the latest by default
    --config FILE --set KEY=VALUE    add_config, resolve_config   a configuration file with overrides
    --json                           add_json, answering          one JSON value on standard output, nothing else there
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sharpen.errors import ConfigError

if TYPE_CHECKING:
    from sharpen.config.load import ConfigFile, ResolvedConfig

CONFIG = Path("run.yaml")
ROOT = Path("checkpoints")
"""Where runs are by default (the setting `checkpoint_root_dir`)."""
_C1 = re.compile("[\x7f-\x9f]")
_RUN_HELP = "a run's directory, or its name below --root; it may still be running"


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add RUN, which `run_of` reads."""
    parser.add_argument("run", nargs="?", metavar="RUN", help=f"{_RUN_HELP} (default: the latest)")
    add_root(parser)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add several RUNs, which `runs_of` reads."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{_RUN_HELP} (default: the last two)")
    add_root(parser)


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add `--root`, the folder of the runs."""
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help=f"where runs are, as <project>/<name> (default: {ROOT})"
    )


def run_of(arguments: argparse.Namespace) -> Path:
    """Return the directory of RUN; the latest run is named on stderr. Raises `ConfigError` if there is no such run."""
    from sharpen.run.found import find_run

    found = find_run(arguments.run, arguments.root)
    if arguments.run is None:
        say(f"sharpen: the latest run is {found}", file=sys.stderr)
    return found


def runs_of(arguments: argparse.Namespace) -> list[Path]:
    """Return the directories of several RUNs; the last two are named on stderr. Raises `ConfigError` if one does not
    exist."""
    from sharpen.run.found import find_run, list_runs

    if arguments.runs:
        return [find_run(name, arguments.root) for name in arguments.runs]
    if len(last := list_runs(arguments.root)[-2:]) < 2:
        raise ConfigError(f"there are no two runs below {arguments.root}: name them, or their folder with --root")
    say(f"sharpen: the last two runs are {last[0]} and {last[1]}", file=sys.stderr)
    return last


def model_of(arguments: argparse.Namespace, model: str) -> str:
    """Return the path of a model: of a run's folder, or of the run of this name below `--root`, its best checkpoint, or
    the latest if none was evaluated; else what was given. Raises `ModelError` for a run without a checkpoint."""
    from sharpen.learning.trainer.checkpoint import best_of_run
    from sharpen.run.found import run_named

    run = Path(model).expanduser()
    if not run.exists():
        run = run_named(model, arguments.root) or run
    return str(best_of_run(run) or model)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print the answer as JSON; everything else goes to stderr")


def say(line: object = "", *, file: IO[str] | None = None, end: str = "\n") -> None:
    """Print a line, on a terminal as lines that fit it. It may hold text of a run: control characters, which would
    command the terminal, become visible."""
    from sharpen.agent.transcript import clean
    from sharpen.screen import shown

    file = file or sys.stdout
    print(shown(clean(str(line)), file), file=file, end=end, flush=True)


def print_json(value: Any, out: IO[str] | None = None) -> None:
    """Print one JSON value. Numbers that are not finite are null."""
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str)
    text = _C1.sub(lambda match: f"\\u{ord(match.group()):04x}", text)  # json escapes the other control characters
    print(text, file=out or sys.stdout, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(inner) for inner in value]
    return value


@contextlib.contextmanager
def answering(arguments: argparse.Namespace) -> Iterator[IO[str]]:
    """Yield the stream of the answer. With `--json`, all else that is printed meanwhile, also by the user's functions,
    goes to stderr."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        yield out


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and what belongs to it."""
    add_config_file(parser)
    parser.set_defaults(takes_default=True)
    add_set(parser)
    add_stage(parser)
    add_imports(parser)


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Add what loads plugins of Trinity-RFT, and lets code import its names."""
    parser.add_argument(
        "--plugin-dir",
        action="append",
        type=Path,
        metavar="DIR",
        help="load the Python files of this folder first, for the workflows, rewards and algorithms that they register",
    )
    parser.add_argument(
        "--trinity-imports",
        action="store_true",
        help="have `import trinity` give Sharpen's names, even if Trinity-RFT is installed (without the option: for a "
        "file in its layout, if it is not installed)",
    )


def add_config_file(parser: argparse._ActionsContainer) -> None:
    """Add `--config` alone, for which `take_default_config` finds a file."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"configuration file (YAML; ours or Trinity-RFT's; default: {CONFIG} in this folder)",
    )


def take_default_config(arguments: argparse.Namespace) -> None:
    """Take `run.yaml` of the current folder where `--config` was not given, and say so. Raises `ConfigError` if there
    is none."""
    if not getattr(arguments, "takes_default", False) or arguments.config is not None:
        return
    if getattr(arguments, "run", None) is not None:  # `plan` of a run
        return
    if not CONFIG.is_file():
        raise ConfigError(f"give a configuration file (--config FILE): there is no {CONFIG} in {Path.cwd()}")
    arguments.config = CONFIG
    say(f"sharpen: --config {CONFIG}, of this folder", file=sys.stderr)


def add_set(parser: argparse.ArgumentParser, example: str = "algorithm.group_size=4") -> None:
    """Add `--set`, which may be given more than once."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help=f"override one setting, e.g. {example}"
    )


def add_stage(parser: argparse.ArgumentParser) -> None:
    """Add `--stage`, for files with several."""
    parser.add_argument("--stage", metavar="NAME", help="only this one of the file's stages (Trinity-RFT's layout)")


def resolve_config(
    arguments: argparse.Namespace, options: dict[str, Any], file: ConfigFile | None = None
) -> ResolvedConfig:
    """Resolve `file`, or the file and the stage that the arguments name, with the overrides of `--set`."""
    from sharpen.compat.files import load_config
    from sharpen.config.load import parse_assignments, resolve

    file = file or load_config(arguments.config, stage=arguments.stage)
    return resolve(file, parse_assignments(arguments.set), options)


def add_price(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add `--price-per-hour`."""
    parser.add_argument("--price-per-hour", type=price, metavar="X", help=f"what the machine costs an hour{more}")


def price(text: str) -> float:
    """Parse an amount of money, 0 or more."""
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def number(text: str) -> float:
    """Parse a number that is finite."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def port(text: str) -> int:
    """Parse a port, or 0 for any free one."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {value}")
    return value


def count(text: str) -> int:
    """Parse a number of things, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
