"""The `sharpen` command: `run`, `check`, `plan`, `eval`, `explain`, `algorithms`, `certify`, `diagnose`, `show`,
`view`, `serve`.

In: the command line. Out: an exit code: 0 the requested work was done, 1 it failed, 2 bad input, 130 interrupted (by
Ctrl-C, or by SIGTERM while a run is open). Each command imports what it needs when it runs, so that `sharpen --help` is
fast.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen import __version__
from sharpen.cli.diagnose import add_diagnose, run_diagnose
from sharpen.cli.doctor import add_doctor, run_doctor
from sharpen.cli.init import add_init, run_init
from sharpen.cli.plan import add_plan, run_plan
from sharpen.cli.serve import add_serve, run_serve
from sharpen.cli.show import add_show, run_show
from sharpen.cli.view import add_view, run_view
from sharpen.errors import ConfigError, DatasetError, ModelError, SamplingError, SharpenError

if TYPE_CHECKING:
    from sharpen.config.load import ConfigFile, ResolvedConfig
    from sharpen.config.run import RunConfig

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_BAD_INPUT = (ConfigError, DatasetError, ModelError, SamplingError)

Function = Callable[..., Any]
Run = tuple["ResolvedConfig", Any, Function | None]
"""A resolved configuration with its workflow (None if the algorithm needs none) and judge."""
Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Command] | None = None) -> int:
    """Run one command and return its exit code. Our own errors are printed as one message to stderr."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    try:
        _prepare_imports(arguments)
        return (commands or COMMANDS)[arguments.command](arguments)
    except KeyboardInterrupt:
        _print_error("sharpen: interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output (`| head`) has ended; discard the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except SharpenError as error:
        _print_error("\n".join([*getattr(error, "__notes__", ()), f"sharpen: {error}"]))
        return BAD_INPUT if isinstance(error, _BAD_INPUT) else FAILED


def _prepare_imports(arguments: argparse.Namespace) -> None:
    """Do what `--trinity-imports` and `--plugin-dir` ask for, in the commands that have them."""
    folders = getattr(arguments, "plugin_dir", None) or []
    if hasattr(arguments, "plugin_dir") and not folders:  # where Trinity-RFT has them
        folders = [Path(folder) for folder in os.environ.get("TRINITY_PLUGIN_DIRS", "").split(os.pathsep) if folder]
    if getattr(arguments, "trinity_imports", False) or folders:
        from sharpen.compat.trinity.imports.stand_in import load_plugins, stand_in

        stand_in(shadow=arguments.trinity_imports)
        for folder in folders:
            load_plugins(folder)


def _print_error(text: str) -> None:
    """Print to stderr. If its reader has gone, the exit code stays the same."""
    from sharpen.monitor.stream import LastingStream

    stderr = LastingStream(sys.stderr)
    stderr.write(f"{text}\n")
    stderr.flush()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="sharpen", description="Reinforcement learning for the model inside your agent."
    )
    parser.add_argument("--version", action="version", version=f"sharpen {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    run = commands.add_parser("run", help="train, from a configuration file")
    _add_config(run)

    check = commands.add_parser("check", help="send a few tasks through agent and judge, before any training")
    _add_config(check)
    check.add_argument("--tasks", type=_count, metavar="N", help="number of tasks (default: check.num_tasks)")

    evaluate = commands.add_parser("eval", help="evaluate a model or an OpenAI-compatible endpoint on a dataset")
    _add_config(evaluate)
    what = evaluate.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="PATH", help="model directory (default: model.model_path)")
    what.add_argument("--base-url", metavar="URL", help="an OpenAI-compatible endpoint instead of a model directory")
    evaluate.add_argument("--model-name", metavar="NAME", help="the model's name at the endpoint")
    evaluate.add_argument("--api-key-env", metavar="VAR", help="environment variable that holds the endpoint's key")
    evaluate.add_argument("--dataset", metavar="PATH", help="dataset (default: eval_dataset)")
    evaluate.add_argument("--split", metavar="S", help="split of the dataset")
    evaluate.add_argument(
        "--transcripts", type=Path, metavar="DIR", help="save what the agent did, for sharpen show DIR --task ID"
    )
    evaluate.add_argument("--output", type=Path, metavar="FILE", help="write each task's reward as JSON")

    explain = commands.add_parser("explain", help="print every setting and where its value comes from")
    _add_config(explain)

    algorithms = commands.add_parser("algorithms", help="list the algorithms with formulas, defaults and sources")
    algorithms.add_argument("--names", action="store_true", help="only the names, one per line")

    certify = commands.add_parser("certify", help="recompute the certificate of a run from its records")
    certify.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    certify.add_argument("--no-logprobs", action="store_true", help="do not score the tokens again (loads no model)")
    certify.add_argument("--json", action="store_true", help="print the certificate as JSON")

    add_doctor(commands.add_parser("doctor", help="is this machine ready? what is here, a tiny step, what to do"))
    add_init(commands.add_parser("init", help="write a folder to start from: agent, judge, tasks, settings, a test"))
    add_diagnose(commands.add_parser("diagnose", help="why is the reward (or the loss) flat? causes, with evidence"))
    add_plan(commands.add_parser("plan", help="predict the memory of a run before anything starts"))
    add_show(commands.add_parser("show", help="print a rollout of a run, token by token"))
    add_view(commands.add_parser("view", help="look at runs in a browser: curves, tasks, rollouts token by token"))
    add_serve(commands.add_parser("serve", help="serve a model to applications, in OpenAI's and Anthropic's protocols"))
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="configuration file (YAML; ours or Trinity-RFT's)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one setting, e.g. algorithm.group_size=4",
    )
    parser.add_argument("--stage", metavar="NAME", help="only this one of the file's stages (Trinity-RFT's layout)")
    parser.add_argument(
        "--plugin-dir",
        action="append",
        type=Path,
        metavar="DIR",
        help="load the Python files of this folder first, for the workflows and rewards that they register",
    )
    parser.add_argument(
        "--trinity-imports",
        action="store_true",
        help="have `import trinity` give Sharpen's names, even if Trinity-RFT is installed (without the option: for a "
        "file in its layout, if it is not installed)",
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _run(arguments: argparse.Namespace) -> int:
    """Train. The run itself prints overrides and notices."""
    from sharpen.compat.files import load_stages

    files = load_stages(arguments.config, stage=arguments.stage)
    if len(files) == 1:
        return _run_one(arguments, files[0])
    from sharpen.tuning import Stage, run_stages

    def opened(file: ConfigFile, options: dict[str, Any]) -> contextlib.AbstractContextManager[Run]:
        return _loaded(arguments, options, file)

    run_stages([Stage(name=file.name, open=partial(opened, file)) for file in files], arguments.config)
    return DONE


def _run_one(arguments: argparse.Namespace, file: ConfigFile) -> int:
    with _loaded(arguments, {}, file) as (resolved, workflow, judge):
        if resolved.evaluate_only:
            return _evaluate_resolved(resolved, workflow, judge, endpoint=resolved.endpoint)
        if resolved.config.mode == "explore":
            from sharpen.run.explore import explore

            explore(resolved, workflow, judge, arguments.config)
            return DONE
        from sharpen.tuning import run_config

        run_config(resolved, workflow, judge, arguments.config)
        return DONE


def _check(arguments: argparse.Namespace) -> int:
    """Check agent and judge before any training. The command fails if the run is not ready."""
    with _loaded(arguments, {"check.num_tasks": arguments.tasks}) as (resolved, workflow, judge):
        from sharpen.run.check import check_config

        _print_overrides(resolved)
        report = check_config(resolved, workflow, judge)
        for line in report.lines():
            print(line)
        return DONE if report.ready else FAILED


def _evaluate(arguments: argparse.Namespace) -> int:
    options: dict[str, Any] = {"model.model_path": arguments.model}
    if arguments.dataset is not None:
        from sharpen.config.public import DatasetConfig

        split = {} if arguments.split is None else {"split": arguments.split}
        options["eval_dataset"] = DatasetConfig(path=arguments.dataset, **split)
    else:
        options["eval_dataset.split"] = arguments.split
    endpoint: Mapping[str, str] | None = _endpoint(arguments)
    files: dict[str, Any] = {"output": arguments.output, "transcripts": arguments.transcripts}
    with _loaded(arguments, options) as (resolved, workflow, judge):
        if endpoint is None and arguments.model is None:
            endpoint = resolved.endpoint
        return _evaluate_resolved(resolved, workflow, judge, endpoint=endpoint, **files)


def _evaluate_resolved(resolved: ResolvedConfig, workflow: Function, judge: Function | None, **options: Any) -> int:
    """Evaluate with the options of `run.evaluation.evaluate`."""
    from sharpen.execution.threads import let_idle_workers_sleep

    let_idle_workers_sleep()
    from sharpen.run.evaluation import evaluate

    _print_overrides(resolved)
    evaluate(resolved, workflow, judge, **options)
    return DONE


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


def _explain(arguments: argparse.Namespace) -> int:
    from sharpen.cli.explain import explain
    from sharpen.compat.files import load_stages
    from sharpen.compat.trinity.registry import check_names

    for file in load_stages(arguments.config, stage=arguments.stage):
        resolved = _resolve(arguments, {}, file)
        explain(resolved)
        for refusal in check_names(resolved.config):
            print(f"this run would be refused: {refusal}")
    return DONE


def _algorithms(arguments: argparse.Namespace) -> int:
    from sharpen.cli.algorithms import print_algorithms

    print_algorithms(names_only=arguments.names)
    return DONE


def _certify(arguments: argparse.Namespace) -> int:
    from sharpen.cli.certify import print_certificate

    holds = print_certificate(arguments.run_dir, logprobs=not arguments.no_logprobs, as_json=arguments.json)
    return DONE if holds else FAILED


def _resolve(arguments: argparse.Namespace, options: dict[str, Any], file: ConfigFile | None = None) -> ResolvedConfig:
    """Resolve `file`, or the file and the stage that the arguments name."""
    from sharpen.compat.files import load_config
    from sharpen.config.load import parse_assignments, resolve

    file = file or load_config(arguments.config, stage=arguments.stage)
    return resolve(file, parse_assignments(arguments.set), options)


@contextlib.contextmanager
def _loaded(arguments: argparse.Namespace, options: dict[str, Any], file: ConfigFile | None = None) -> Iterator[Run]:
    """Yield configuration, workflow (None if the algorithm needs none) and judge, in their environment."""
    from sharpen.config.environment import environment

    resolved = _resolve(arguments, options, file)
    with environment(resolved.config):
        workflow, judge = _load_functions(arguments, resolved.config)
        yield resolved, workflow, judge


def _load_functions(arguments: argparse.Namespace, config: RunConfig) -> tuple[Any, Function | None]:
    """Import the workflow and the judge."""
    from sharpen.config.functions import import_function

    if config.mode == "train":  # agent and judge are the explorer's, and need not be here
        return None, None
    judge = import_function(config.judge) if config.judge else None
    if config.workflow is None and arguments.command == "run":
        from sharpen.algorithm.supervised import learns_from_rows

        if learns_from_rows(config):
            return None, judge
    if config.workflow is None:
        raise ConfigError(
            f"{arguments.config}: 'workflow' is missing; name your agent's function, e.g. agent.py:run_agent (in a "
            "Trinity-RFT file: buffer.explorer_input.taskset.default_workflow_type)"
        )
    from sharpen.compat.trinity import configured_workflow

    return configured_workflow(config.workflow, judge, config), judge


def _print_overrides(resolved: ResolvedConfig) -> None:
    for line in (*resolved.notices, *resolved.overrides):
        print(line)


COMMANDS: Mapping[str, Command] = {
    "run": _run,
    "check": _check,
    "eval": _evaluate,
    "explain": _explain,
    "algorithms": _algorithms,
    "certify": _certify,
    "doctor": run_doctor,
    "init": run_init,
    "diagnose": run_diagnose,
    "plan": run_plan,
    "show": run_show,
    "view": run_view,
    "serve": run_serve,
}


if __name__ == "__main__":
    sys.exit(main())
