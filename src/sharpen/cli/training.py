"""`sharpen run`, `check` and `eval`: the commands that start an agent.

In: a configuration file, the overrides. Out: an exit code; what was found, on the terminal or as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.cli.arguments import (
    add_config,
    add_json,
    add_root,
    answering,
    count,
    model_of,
    print_json,
    resolve_config,
    say,
)
from sharpen.errors import ConfigError
from sharpen.screen import text_width

if TYPE_CHECKING:
    from sharpen.config.load import ConfigFile, ResolvedConfig
    from sharpen.config.run import RunConfig

DONE, FAILED = 0, 1
Function = Callable[..., Any]
Run = tuple["ResolvedConfig", Any, Function | None]
"""A resolved configuration with its workflow (None if the algorithm needs none) and judge."""


def add_run_command(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    add_config(parser)
    add_json(parser)


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    add_config(parser)
    add_json(parser)
    parser.add_argument("--tasks", type=count, metavar="N", help="number of tasks (default: check.num_tasks)")


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval`."""
    add_config(parser)
    add_json(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model", metavar="MODEL", help="a model's folder or name, or a run's (default: model.model_path)"
    )
    what.add_argument("--base-url", metavar="URL", help="an OpenAI-compatible endpoint instead of a model directory")
    add_root(parser)
    parser.add_argument("--model-name", metavar="NAME", help="the model's name at the endpoint")
    parser.add_argument("--api-key-env", metavar="VAR", help="environment variable that holds the endpoint's key")
    parser.add_argument("--dataset", metavar="PATH", help="dataset (default: eval_dataset)")
    parser.add_argument("--split", metavar="S", help="split of the dataset")
    parser.add_argument(
        "--transcripts", type=Path, metavar="DIR", help="save what the agent did, for sharpen show DIR --task ID"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write each task's reward as JSON")


def run_run(arguments: argparse.Namespace) -> int:
    """Train. The run itself prints overrides and notices."""
    from sharpen.compat.files import load_stages

    files = load_stages(arguments.config, stage=arguments.stage)
    with answering(arguments) as out:
        answer = _run_one(arguments, files[0]) if len(files) == 1 else _run_stages(arguments, files)
        if arguments.json:
            print_json(answer, out)
    return FAILED if answer.get("no_result") else DONE


def _run_stages(arguments: argparse.Namespace, files: Sequence[ConfigFile]) -> Any:
    from sharpen.tuning import Stage, run_stages

    def opened(file: ConfigFile, options: dict[str, Any]) -> contextlib.AbstractContextManager[Run]:
        return _loaded(arguments, options, file)

    result = run_stages([Stage(name=file.name, open=partial(opened, file)) for file in files], arguments.config)
    return _summary(result.run_dir)


def _run_one(arguments: argparse.Namespace, file: ConfigFile) -> Any:
    """Train, explore or evaluate as the file says, and return what came out, as JSON."""
    resolved = resolve_config(arguments, {}, file)
    if resolved.evaluate_only:
        with _functions(arguments, resolved) as (workflow, judge):
            return _evaluate_resolved(resolved, workflow, judge, endpoint=resolved.endpoint)
    if resolved.config.mode == "explore":
        with _functions(arguments, resolved) as (workflow, judge):
            from sharpen.run.explore import explore

            done = explore(resolved, workflow, judge, arguments.config)
            return {"run_dir": str(done.run_dir), "batches": done.batches, "total": done.total}
    from sharpen.run.decide import check_before
    from sharpen.run.panel import open_display

    _check_names(arguments, resolved.config)
    check_before(resolved.config)
    with contextlib.closing(open_display(resolved)) as display, _functions(arguments, resolved) as (workflow, judge):
        from sharpen.tuning import run_config

        return _summary(run_config(resolved, workflow, judge, arguments.config, display).run_dir)


def _summary(run_dir: Path) -> Any:
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def run_check(arguments: argparse.Namespace) -> int:
    """Check agent and judge before any training. The command fails if the run is not ready. How far it is is shown on
    stderr, if that is a terminal."""
    options = {"check.num_tasks": arguments.tasks}
    with answering(arguments) as out, _loaded(arguments, options) as (resolved, workflow, judge):
        from sharpen.show.monitor.display import Display

        _print_overrides(resolved)
        with contextlib.closing(Display(0, sys.stderr)) as display:
            display.doing("loading libraries")
            from sharpen.run.check import check_config

            report = check_config(resolved, workflow, judge, display)
        if arguments.json:
            print_json(report.to_json(), out)
        else:
            for line in report.lines(text_width(sys.stdout)):
                say(line)
        return DONE if report.ready else FAILED


def run_eval(arguments: argparse.Namespace) -> int:
    """Evaluate a model or an endpoint, and print its accuracies. The command fails if they say nothing about the
    model."""
    options: dict[str, Any] = {"model.model_path": arguments.model and model_of(arguments, arguments.model)}
    if arguments.dataset is not None:
        from sharpen.config.public import DatasetConfig

        split = {} if arguments.split is None else {"split": arguments.split}
        options["eval_dataset"] = DatasetConfig(path=arguments.dataset, **split)
    else:
        options["eval_dataset.split"] = arguments.split
    endpoint: Mapping[str, str] | None = _endpoint(arguments)
    files: dict[str, Any] = {"output": arguments.output, "transcripts": arguments.transcripts}
    with answering(arguments) as out, _loaded(arguments, options) as (resolved, workflow, judge):
        if endpoint is None and arguments.model is None:
            endpoint = resolved.endpoint
        found = _evaluate_resolved(resolved, workflow, judge, endpoint=endpoint, **files)
        if arguments.json:
            print_json(found, out)
        return FAILED if found["no_result"] else DONE


def _evaluate_resolved(resolved: ResolvedConfig, workflow: Function, judge: Function | None, **options: Any) -> Any:
    """Evaluate with the options of `run.evaluation.evaluate`, and return the result as JSON."""
    from sharpen.machine import let_idle_workers_sleep

    let_idle_workers_sleep()
    from sharpen.run.evaluation import evaluate
    from sharpen.show.monitor.summary import evaluation_json

    _print_overrides(resolved)
    return evaluation_json(evaluate(resolved, workflow, judge, **options))


def _endpoint(arguments: argparse.Namespace) -> dict[str, str] | None:
    """Return `base_url`, `model_name` and `api_key` of the endpoint given, None if there is none."""
    if arguments.base_url is None:
        for option, value in (("--model-name", arguments.model_name), ("--api-key-env", arguments.api_key_env)):
            if value is not None:
                raise ConfigError(f"{option} belongs to --base-url, which was not given")
        return None
    if arguments.model_name is None:
        raise ConfigError("--base-url needs --model-name, the model's name at the endpoint")
    api_key = "none"
    if arguments.api_key_env is not None:
        if arguments.api_key_env not in os.environ:
            raise ConfigError(f"the environment variable {arguments.api_key_env} (--api-key-env) is not set")
        api_key = os.environ[arguments.api_key_env]
    return {"base_url": arguments.base_url, "model_name": arguments.model_name, "api_key": api_key}


@contextlib.contextmanager
def _loaded(arguments: argparse.Namespace, options: dict[str, Any], file: ConfigFile | None = None) -> Iterator[Run]:
    """Yield configuration, workflow (None if the algorithm needs none) and judge, in their environment."""
    resolved = resolve_config(arguments, options, file)
    with _functions(arguments, resolved) as (workflow, judge):
        yield resolved, workflow, judge


@contextlib.contextmanager
def _functions(arguments: argparse.Namespace, resolved: ResolvedConfig) -> Iterator[tuple[Any, Function | None]]:
    """Yield workflow (None if the algorithm needs none) and judge, in their environment."""
    from sharpen.agent.environments.opening import closing_environment
    from sharpen.config.functions import variables

    with variables(resolved.config.rollout.env_vars), closing_environment(resolved.config.environment):
        yield _load_functions(arguments, resolved.config)


def _load_functions(arguments: argparse.Namespace, config: RunConfig) -> tuple[Any, Function | None]:
    """Import the workflow and the judge, or take those of the environment."""
    from sharpen.agent.environments.opening import functions_of
    from sharpen.config.functions import import_function

    if config.mode == "train":  # agent and judge are the explorer's, and need not be here
        return None, None
    _check_names(arguments, config)
    judge = import_function(config.judge) if config.judge else None
    workflow = None
    if config.workflow is not None:
        from sharpen.compat.trinity import configured_workflow

        workflow = configured_workflow(config.workflow, judge, config)
    return functions_of(config.environment, workflow, judge)


def _check_names(arguments: argparse.Namespace, config: RunConfig) -> None:
    """Check the names of workflow and judge, without importing anything. Raises `ConfigError`."""
    from sharpen.config.functions import place_of
    from sharpen.learning.algorithm.supervised import learns_from_rows

    if config.mode == "train":
        return
    if config.judge:
        place_of(config.judge)
    has_agent = config.workflow is not None or config.environment is not None
    if not has_agent and not (arguments.command == "run" and learns_from_rows(config.algorithm)):
        raise ConfigError(
            f"{arguments.config}: 'workflow' is missing; name your agent's function, e.g. agent.py:run_agent, or an "
            "environment (in a Trinity-RFT file: buffer.explorer_input.taskset.default_workflow_type)"
        )


def _print_overrides(resolved: ResolvedConfig) -> None:
    for line in (*resolved.notices, *resolved.overrides):
        say(line)
