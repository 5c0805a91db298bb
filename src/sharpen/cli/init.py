"""`sharpen init DIR`: write a folder that runs at once, with an agent, a judge, tasks, `run.yaml` and a test.

In: the folder, the framework of the agent or an environment, the model. Out: the files; without a model, a tiny one
made on the spot.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.cli.arguments import add_json, print_json, say
from sharpen.cli.starter.folder import FRAMEWORKS, TINY, Starter, write_environment, write_starter
from sharpen.models.files import check_model_path

if TYPE_CHECKING:
    from sharpen.cli.starter.questions import Question


def add_init(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write; none of its files is overwritten")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--from",
        dest="framework",
        choices=FRAMEWORKS,
        default="openai",
        help="what the agent is written with; tools: the openai package, and a calculator that it calls",
    )
    what.add_argument(
        "--env",
        metavar="TYPE:ID",
        help="an environment in place of agent, judge and tasks: reasoning-gym:chain_sum (docs/use/environments.md)",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="model to train: a folder, or a name on the hub (default: a tiny model, made in half a minute, which "
        "needs no download and can learn these tasks only)",
    )
    add_json(parser)


def run_init(arguments: argparse.Namespace) -> int:
    """Write the folder. Raises `ConfigError` if one of its files is there already."""
    model = arguments.model
    if model is not None and Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().absolute())  # run.yaml's paths are seen from its own folder
    if model is not None:
        check_model_path(model, "--model")
    starter, taught = _write(arguments, model)
    if model is None:
        _make_tiny_model(starter.folder / TINY, tools=arguments.framework == "tools", questions=taught)
    missing = [name for name in starter.requirements if not _installed(name)]
    commands = [
        *([f"pip install {' '.join(map(shlex.quote, missing))}"] if missing else []),
        f"cd {shlex.quote(str(starter.folder))}",
        "sharpen check --config run.yaml",
        "sharpen run --config run.yaml",
    ]
    if arguments.json:
        content = {"folder": str(starter.folder), "files": starter.files, "model": model or TINY, "commands": commands}
        print_json(content)
        return 0
    say(f"{starter.folder}: {', '.join(starter.files)}")
    say("\nnext:\n" + "\n".join(f"  {command}" for command in commands))
    return 0


def _write(arguments: argparse.Namespace, model: str | None) -> tuple[Starter, Sequence[Question]]:
    """Write the folder. Returns it, and the questions of its environment that a tiny model is to be taught."""
    if arguments.env is None:
        return write_starter(arguments.folder, arguments.framework, model), ()
    from sharpen.cli.starter.questions import EASY, PROMPT, questions_of
    from sharpen.config.doors import names
    from sharpen.config.public import ENVIRONMENTS, EnvironmentConfig

    kind, _, id_ = arguments.env.partition(":")
    if kind not in names("environments", dict.fromkeys(ENVIRONMENTS)):
        kind, id_ = arguments.env, ""  # one of the user's own: module:name
    if kind == "harbor" and id_:
        id_ = str(Path(id_).expanduser().absolute())  # the run is started elsewhere, in the new folder
    more: dict[str, Any] = {}
    if model is None:
        more = {"args": EASY.get(id_, {}), "system_prompt": PROMPT}
    environment = EnvironmentConfig(type=kind, id=id_ or None, **more)
    questions = questions_of(environment) if model is None else ()
    return write_environment(arguments.folder, environment, model), questions


def _make_tiny_model(folder: Path, *, tools: bool, questions: Sequence[Question]) -> None:
    say(f"making a tiny model in {folder}, about half a minute on two cores", file=sys.stderr)
    started = time.perf_counter()
    from sharpen.cli.starter.tiny_model import make_tiny_model
    from sharpen.models.files import quiet_transformers

    quiet_transformers()
    make_tiny_model(folder, tools=tools, questions=questions)
    say(f"made in {time.perf_counter() - started:.0f} s", file=sys.stderr)


def _installed(requirement: str) -> bool:
    """Whether the package of a requirement (`name>=1.0`) is installed, in any version."""
    try:
        version(requirement.partition(">")[0])
    except PackageNotFoundError:
        return False
    return True
