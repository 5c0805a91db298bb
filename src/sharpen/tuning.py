"""`tune()`: trains the model of a workflow function, and shows whether it became better.

In: the user's functions, dataset, model and algorithm, or a configuration file. Out: a `TuneResult` and the run
directory. Everything that can be checked without loading a model is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.agent.environments.opening import closing_environment, functions_of
from sharpen.agent.rollout.signature import name_of
from sharpen.compat.files import load_config
from sharpen.compat.trinity import configured_workflow
from sharpen.config.functions import import_function, variables
from sharpen.config.load import ResolvedConfig, resolve
from sharpen.config.problems import Problems
from sharpen.config.public import AlgorithmConfig, DatasetConfig, EnvironmentConfig, MonitorType, TunerModelConfig
from sharpen.config.run import JudgeFloorConfig
from sharpen.errors import INVALID_INPUT, SharpenError

if TYPE_CHECKING:
    from sharpen.run.assembly import Site
    from sharpen.run.loop import Loop
    from sharpen.run.result import TuneResult
    from sharpen.show.monitor.display import Display


def tune(
    workflow_func: Callable[..., Any] | None = None,
    config_path: str | Path | None = None,
    *,
    judge_func: Callable[..., Any] | None = None,
    train_dataset: DatasetConfig | None = None,
    eval_dataset: DatasetConfig | None = None,
    environment: EnvironmentConfig | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig] | None = None,
    algorithm: AlgorithmConfig | None = None,
    judge_floor: JudgeFloorConfig | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: MonitorType | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TuneResult:
    """Tune the model inside an agent with reinforcement learning.

    `workflow_func` is `async def (task, model)` and runs the agent on one task (or a Trinity `Workflow` class, or its
    registered name; see `docs/use/trinity.md`); `judge_func` is `async def (task, response)` and scores its response
    (without it the workflow returns the reward). An `environment` brings tasks, workflow and judge, as far as they are
    not given. `config_path` names a YAML file, `settings` holds further settings in the same layout (`{"rollout":
    {"timeout_s": 60}}`, or with dotted keys); arguments override both, and each override is printed. A fixed
    `experiment_name` continues that run from its last checkpoint. `sft`, `cpt` and `dpo` learn from the rows themselves
    and use a workflow only to evaluate the agent (`docs/use/beyond-rl.md`). With a `judge_floor` nothing starts unless
    the judge agrees with its owner's marks (`docs/use/judges.md`; else `JudgeError`).

    Works in scripts and notebooks. Raises `ConfigError`, `DatasetError` or `ModelError` for bad input, before anything
    is loaded where possible; `RolloutError` if too many rollouts fail; `ParityError` if the trainer's logprobs differ
    from the engine's. Ctrl-C saves a checkpoint and raises `KeyboardInterrupt`.
    """
    arguments: dict[str, Any] = {
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "environment": environment,
        "model": model,
        "auxiliary_models": auxiliary_models or None,
        "algorithm": algorithm,
        "judge_floor": judge_floor,
        "project": project_name,
        "name": experiment_name,
        "monitor_type": monitor_type,
    }
    try:
        return _tune(arguments, None if config_path is None else Path(config_path), settings, workflow_func, judge_func)
    except (
        INVALID_INPUT
    ) as error:  # says all that there is to say: a script ends with it, and not with where we noticed
        raise error.with_traceback(None) from None


def _tune(
    arguments: dict[str, Any],
    path: Path | None,
    settings: Mapping[str, Any] | None,
    workflow_func: Any,
    judge_func: Callable[..., Any] | None,
) -> TuneResult:
    """Resolve the arguments of `tune` and run."""
    problems = Problems()
    found = problems.check(_resolve_arguments, path, settings, arguments, workflow_func, judge_func)
    if found is None:  # without a configuration, report the other problems of the arguments too
        from sharpen.run.decide import check_arguments

        check_arguments(problems, arguments, workflow_func, judge_func)
        problems.raise_found()
    assert found is not None
    resolved, workflow, judge = found
    with variables(resolved.config.rollout.env_vars), closing_environment(resolved.config.environment):
        return run_config(resolved, workflow, judge, path)


def _resolve_arguments(
    path: Path | None,
    settings: Mapping[str, Any] | None,
    arguments: dict[str, Any],
    workflow_func: Any,
    judge_func: Callable[..., Any] | None,
) -> tuple[ResolvedConfig, Any, Callable[..., Any] | None]:
    """Return the configuration of file, settings and arguments, and the functions to run."""
    file = load_config(path) if path is not None else None
    if file is not None and "workflow" in file.settings and workflow_func is not None:
        arguments["workflow"] = workflow_func if isinstance(workflow_func, str) else name_of(workflow_func)
    resolved = resolve(file, settings, arguments)
    config, chosen = resolved.config, workflow_func
    if workflow_func is None:
        from sharpen.learning.algorithm.supervised import learns_from_rows

        named = learns_from_rows(config.algorithm) or config.environment is not None
        chosen = config.workflow if named else None
    with variables(config.rollout.env_vars):
        if config.environment is not None and judge_func is None and config.judge is not None:
            judge_func = import_function(config.judge)
        workflow = configured_workflow(chosen, judge_func, config)
        used = None if config.mode == "train" else config.environment  # in that mode the explorer's
        return resolved, *functions_of(used, workflow, judge_func)


def run_config(
    resolved: ResolvedConfig,
    workflow: Any,
    judge: Callable[..., Any] | None,
    config_path: Path | None = None,
    display: Display | None = None,
) -> TuneResult:
    """Run a resolved configuration, for `tune()` and `sharpen run`. `workflow` may be any object, and is checked.
    `display` shows the run's panel already; without it, this shows it before anything heavy is imported."""
    from sharpen.run.panel import open_display
    from sharpen.show.monitor.stream import open_missing_streams

    open_missing_streams()
    if display is None:
        from sharpen.run.decide import check_before

        check_before(resolved.config, workflow, judge)
    with closing(display or open_display(resolved)) as display:
        from sharpen.run.assembly import open_loop
        from sharpen.run.check import check_first
        from sharpen.run.judging import check_floor
        from sharpen.run.outcome import judge_run, result, write_outcome

        check_floor(resolved.config, judge, display.message)
        with open_loop(resolved, workflow, judge, config_path, display) as (loop, site):
            try:
                check_first(loop, site)
                loop.run()
                verdict = judge_run(loop, site)
                write_outcome(loop, site, verdict)
            except BaseException as error:
                _end_early(loop, site, error)
                raise
            _write_report(site.directory.path, site.display.message)
            return result(loop, site, verdict)


def _end_early(loop: Loop, site: Site, error: BaseException) -> None:
    """Write what there is of a run that an error or an interrupt ends. What cannot be written is said: the error that
    ends the run is the one to raise."""
    from sharpen.run.outcome import end_early, write_outcome

    try:
        write_outcome(loop, site, None, error)
        site.transcripts.flush()
    except Exception as failure:
        site.display.message(f"the results so far could not be written ({type(failure).__name__}: {failure})")
    _write_report(site.directory.path, site.display.message)
    end_early(loop, site)


def _write_report(run_dir: Path, message: Callable[[str], None]) -> None:
    """Write the report and the cards of the checkpoints, for reading only: whatever goes wrong here is said, and takes
    no result away."""
    from sharpen.show.report.card import write_cards
    from sharpen.show.report.contents import read_report
    from sharpen.show.report.render import write_report

    try:
        report = read_report(run_dir)
        write_report(run_dir, report)
        write_cards(run_dir, report)
    except Exception as error:
        message(f"the report could not be written ({type(error).__name__}: {error}); try: sharpen report {run_dir}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One run of several. `open` resolves its configuration with further settings, and imports workflow and judge."""

    name: str
    open: Callable[[dict[str, Any]], AbstractContextManager[tuple[ResolvedConfig, Any, Callable[..., Any] | None]]]


def run_stages(stages: Sequence[Stage], config_path: Path | None = None) -> TuneResult:
    """Run stages one after the other, each on the model of the one before; the result is that of the last one. All are
    checked before the first one loads anything. Raises what `tune()` raises, with the stage's name."""
    from sharpen.run.decide import decide

    for stage in stages:
        with _named_errors(stage.name), stage.open({}) as (resolved, workflow, judge):
            decide(resolved.config, workflow, judge)
    result: TuneResult | None = None
    for number, stage in enumerate(stages, 1):
        print(f"stage {number} of {len(stages)}: {stage.name}", flush=True)
        options = {} if result is None else {"model.model_path": str(result.model_dir)}
        with _named_errors(stage.name), stage.open(options) as (resolved, workflow, judge):
            result = run_config(resolved, workflow, judge, config_path)
    assert result is not None, "a file has at least one stage"
    return result


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Add the stage's name to the notes of what it raises."""
    try:
        yield
    except SharpenError as error:
        error.add_note(f"in {name}:")
        raise
