"""`tune()`: the whole line, from a workflow function to a better model with the evidence.

In: the user's functions, dataset, model, algorithm; or a configuration file. Out: a `TuneResult` and the run directory.
Everything that can be checked without loading a model is checked first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.algorithm.presets import Algorithm
from sharpen.assembly import Opened, best_of, make_evaluator, make_monitor, models_left, open_run
from sharpen.certificate.certificate import write_certificate
from sharpen.compat.files import load_config
from sharpen.compat.trinity import configured_workflow
from sharpen.config.load import Resolved, resolve
from sharpen.config.public import AlgorithmConfig, DatasetConfig, MonitorType, TunerModelConfig
from sharpen.decide import decide_rollouts
from sharpen.errors import ConfigError, NoSignalError, RolloutError
from sharpen.execution.probe import probe_at_start
from sharpen.execution.start import start_serving
from sharpen.execution.threads import let_idle_workers_sleep
from sharpen.execution.trainers import AnyTrainer, make_trainer
from sharpen.experience.replay import Replay
from sharpen.forecast import after_run
from sharpen.interrupts import stop_signals
from sharpen.monitor.curve import draw_reward_curve
from sharpen.monitor.statistics import Evaluation, by_mode
from sharpen.monitor.summary import Summary, peak_memory_mb, process_seconds, write_summary
from sharpen.monitor.verdict import Candidates, Verdict, judge_rewards
from sharpen.recipe import Job, RolloutRecipe, learns_from_rows
from sharpen.result import TuneResult
from sharpen.rollout.check import CheckReport, check_groups
from sharpen.rollout.signature import name_of
from sharpen.supervised.expert import ExpertRows, make_expert_rows
from sharpen.supervised.run import run_supervised
from sharpen.task_data import TaskData, read_tasks
from sharpen.types import Task

if TYPE_CHECKING:
    from sharpen.execution.run_directory import RunDirectory
    from sharpen.execution.start import Served
    from sharpen.loop import Loop, Progress


def tune(
    workflow_func: Callable[..., Any] | None = None,
    config_path: str | Path | None = None,
    *,
    judge_func: Callable[..., Any] | None = None,
    train_dataset: DatasetConfig | None = None,
    eval_dataset: DatasetConfig | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig] | None = None,
    algorithm: AlgorithmConfig | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: MonitorType | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TuneResult:
    """Tune the model inside an agent with reinforcement learning.

    `workflow_func` is `async def (task, model)` and runs the agent on one task (or a Trinity `Workflow` class, or its
    registered name; see `docs/use/trinity.md`); `judge_func` is `async def (task, response)` and scores its response
    (without it the workflow returns the reward). `config_path` names a YAML file, `settings` holds further settings in
    the same layout (`{"rollout": {"timeout_s": 60}}`, or with dotted keys); arguments override both, and each override
    is printed. A fixed `experiment_name` continues that run from its last checkpoint. `sft`, `cpt` and `dpo` learn from
    the rows themselves and use a workflow only to evaluate the agent (`docs/use/beyond-rl.md`).

    Works in a script and in a notebook. Raises `ConfigError`, `DatasetError` or `ModelError` for bad input, before
    anything is loaded where that is possible; `RolloutError` when too many rollouts fail; `ParityError` when the
    trainer's logprobs differ from the engine's. Ctrl-C saves a checkpoint and raises `KeyboardInterrupt`.
    """
    arguments: dict[str, Any] = {
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "model": model,
        "auxiliary_models": auxiliary_models or None,
        "algorithm": algorithm,
        "project": project_name,
        "name": experiment_name,
        "monitor_type": monitor_type,
    }
    file = load_config(config_path) if config_path is not None else None
    if file is not None and "workflow" in file.settings and workflow_func is not None:
        arguments["workflow"] = workflow_func if isinstance(workflow_func, str) else name_of(workflow_func)
    resolved = resolve(file, settings, arguments)
    of_file = workflow_func is None and learns_from_rows(resolved.config)
    chosen = resolved.config.workflow if of_file else workflow_func
    workflow = configured_workflow(chosen, judge_func, resolved.config)
    return run_config(resolved, workflow, judge_func, Path(config_path) if config_path is not None else None)


def run_config(
    resolved: Resolved,
    workflow: Any,
    judge: Callable[..., Any] | None,
    config_path: Path | None = None,
) -> TuneResult:
    """Run a resolved configuration; what `tune()` and `sharpen run` share. A wrong workflow is refused here."""
    if learns_from_rows(resolved.config) and not resolved.evaluate_only:
        return run_supervised(resolved, workflow, judge, config_path)
    with open_loop(resolved, workflow, judge, config_path) as (loop, directory):
        return _run(loop, directory)


@contextlib.contextmanager
def open_loop(
    resolved: Resolved,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    config_path: Path | None = None,
) -> Iterator[tuple[Loop, RunDirectory]]:
    """Check everything, put the parts of a run together, and take them apart at the end. Nothing has run yet."""
    config = resolved.config
    if resolved.evaluate_only:
        raise ConfigError(
            f"{config_path}: mode is 'bench', which evaluates and does not train: use `sharpen eval --config "
            f"{config_path}`, or mode both"
        )
    job = decide_rollouts(config, workflow, judge)
    data = read_tasks(config, job.recipe.algorithm)
    with contextlib.ExitStack() as stack:
        rows = {"train_dataset": data.training, "held_out": data.held_out, "expert": data.expert}
        opened = stack.enter_context(open_run(resolved, config_path, rows, data.messages))
        serving = start_serving(job)
        stack.callback(serving.close)
        opened.display.message(serving.line)
        trainer = make_trainer(
            job,
            total_steps=opened.total_steps,
            ranks=serving.ranks,
            probe=probe_at_start(config, serving, data.training),
        )
        stack.callback(trainer.close)
        stack.enter_context(stop_signals())  # once more: Ray sets handlers of its own as it starts
        loop = _assemble(opened, job, serving, trainer, data)
        stack.callback(loop.monitor.close)
        stack.callback(loop.journal.close)
        yield loop, opened.directory


def check_config(
    resolved: Resolved, workflow: Callable[..., Any], judge: Callable[..., Any] | None, num_tasks: int | None = None
) -> CheckReport:
    """Send a few tasks through agent and judge, and say whether there is something to learn."""
    config = resolved.config
    if learns_from_rows(config):
        raise ConfigError(f"{config.algorithm.algorithm_type!r} learns without rollouts: there is nothing to check")
    job = decide_rollouts(config, workflow, judge)
    data = read_tasks(config, job.recipe.algorithm)
    let_idle_workers_sleep()
    serving = start_serving(job)
    try:
        number = num_tasks or config.check.num_tasks
        return _check(job.recipe.algorithm, serving, data.training, number, version=0, model=config.model)
    finally:
        serving.close()


def _assemble(opened: Opened, job: Job[RolloutRecipe], serving: Served, trainer: AnyTrainer, data: TaskData) -> Loop:
    from sharpen.diagnose.diagnosis import Watch
    from sharpen.experience.journal import Journal
    from sharpen.explorer import Explorer
    from sharpen.loop import Loop

    config, directory, display = opened.config, opened.directory, opened.display
    recipe, algorithm, schedule = job.recipe, job.recipe.algorithm, job.recipe.schedule
    expert = make_expert_rows(config, algorithm, data.expert, serving.folder)
    progress = _restored(opened, serving, trainer, expert)
    _join_weights(opened, serving, trainer, progress.step, shared=not schedule.overlaps)
    journal = Journal(directory.journal)
    journal.begin(progress.step, trainer.version)
    if trainer.rounding is not None:
        journal.add_parity(trainer.rounding.to_json())
    replay = None if recipe.replay is None else Replay(recipe.replay)
    if replay is not None and directory.checkpoint is not None:
        replay.restore(directory.journal, algorithm, step=progress.step, version=trainer.version)
    if schedule.overlaps:
        display.message(schedule.line)
    explorer = Explorer(
        config,
        algorithm,
        serving=serving,
        tasks=data.training,
        order=opened.order,
        schedule=schedule,
        total_steps=opened.total_steps,
        display=display,
        trained=progress.step,
        version=trainer.version,
        drawn=progress.drawn,
    )
    return Loop(
        config=config,
        algorithm=algorithm,
        serving=serving,
        trainer=trainer,
        explorer=explorer,
        journal=journal,
        monitor=make_monitor(config, directory, progress.step, display),
        display=display,
        watch=Watch(recipe),
        evaluator=make_evaluator(opened, serving, data.held_out, data.further) if data.held_out else None,
        run_dir=directory.path,
        total_steps=opened.total_steps,
        progress=progress,
        process_seconds=process_seconds,
        expert=expert,
        replay=replay,
    )


def _restored(opened: Opened, serving: Served, trainer: AnyTrainer, expert: ExpertRows | None) -> Progress:
    """How far the run is; what has a state is put back to there."""
    from sharpen.loop import Progress

    if opened.directory.checkpoint is None:
        return Progress(order=opened.order.state(), expert={} if expert is None else expert.state())
    progress = Progress.from_json(trainer.restore(opened.directory.checkpoint))
    progress.version = trainer.version
    opened.order.restore(progress.order)
    if expert is not None:
        expert.restore(progress.expert)
    serving.auxiliary.restore(progress.auxiliary_tokens)
    return progress


def _join_weights(opened: Opened, serving: Served, trainer: AnyTrainer, step: int, *, shared: bool) -> None:
    """Settle how the trainer's weights reach the engine, and serve those of a continued run."""
    from sharpen.execution.shared_weights import publish_adapters_alone, share_weights

    publish_adapters_alone(serving.engine, trainer)
    if shared:
        share_weights(serving.engine, trainer)
    if opened.directory.checkpoint is not None:
        opened.display.message(f"continuing {opened.directory.path.name} after step {step}")
        serving.publish(trainer.version, trainer.state_tensors())
    for line in trainer.lines:
        opened.display.message(line)


def _run(loop: Loop, directory: RunDirectory) -> TuneResult:
    """Check, train, and leave the evidence; also after a failure the files say what there is."""
    verdict, models = None, None
    try:
        if loop.config.check.enabled and loop.progress.step == 0:
            _check_first(loop)
        loop.run()
        models = _models(loop, directory)
        verdict = judge_rewards(models, loop.config.evaluation.decided_by)
    finally:
        _write_outcome(loop, directory, verdict)
    progress, display = loop.progress, loop.display
    if progress.before is not None and progress.after is not None:
        display.table(progress.before, progress.after)
    display.usage(directory.path, verdict, directory.picture, tensorboard=loop.config.monitor_type == "tensorboard")
    return TuneResult(
        run_dir=directory.path,
        verdict=verdict,
        model_dir=models.last.folder,
        best_model_dir=best_of(directory, models, loop.serving.folder),
        before=by_mode(progress.before),
        after=by_mode(progress.after),
        rewards_before=progress.before,
        rewards_after=progress.after,
        steps=progress.step,
    )


def _models(loop: Loop, directory: RunDirectory) -> Candidates[Evaluation]:
    progress = loop.progress
    return models_left(
        directory,
        loop.config.model.model_path,
        before=progress.before,
        after=progress.after,
        best=progress.best,
        num_evaluated=progress.num_evaluated,
    )


def _check_first(loop: Loop) -> None:
    """The brief pre-flight check; its findings are printed. Raises `RolloutError` if every rollout failed at once,
    `NoSignalError` where the settings ask for it."""
    num_tasks, version = loop.config.check.num_tasks, loop.trainer.version
    report = _check(
        loop.algorithm, loop.serving, loop.explorer.tasks, num_tasks, version=version, model=loop.config.model
    )
    for line in _brief(report):
        loop.display.message(line)
    if report.all_failed:
        raise RolloutError(f"check: {report.all_failed}")
    if report.statistics.mean_calls and not report.trains:
        raise NoSignalError("check: no call can be trained, so a run would change nothing (see the lines above)")
    if not report.has_signal and loop.config.check.stop_without_signal:
        raise NoSignalError(
            "check: every reward was the same, so there is nothing to learn from; "
            "check.stop_without_signal: false goes on all the same"
        )


def _brief(report: CheckReport) -> list[str]:
    found = report.statistics
    rewards = (
        f"reward {found.reward_mean:.3f}, {found.num_groups - found.num_flat_groups} tasks with differing rewards"
        if not math.isnan(found.reward_mean)
        else "no reward"
    )
    line = (
        f"check: {found.num_rollouts} rollouts of {found.num_groups} tasks, {rewards}, {report.seconds:.2f} s a "
        f"rollout: {'ready' if report.ready else 'not ready'}"
    )
    return [line, *(f"  ! {finding}" for finding in report.findings)]


def _check(
    algorithm: Algorithm,
    serving: Served,
    tasks: Sequence[Task],
    num_tasks: int,
    *,
    version: int,
    model: TunerModelConfig,
) -> CheckReport:
    chosen = tasks[:num_tasks]
    groups = serving.runner.run(chosen, group_ids=[f"check/{task.id}" for task in chosen], version=version)
    return check_groups(groups, needs_reward=algorithm.needs_reward, model=model)


def _write_outcome(loop: Loop, directory: RunDirectory, verdict: Verdict | None) -> None:
    from sharpen.trainer.checkpoint import pointed

    progress = loop.progress
    summary = Summary(
        before=progress.before,
        after=progress.after,
        seconds=process_seconds(),
        seconds_to_first_step=progress.seconds_to_first_step,
        steps=progress.step,
        rollouts=progress.rollouts,
        sampled_tokens=progress.sampled_tokens,
        trained_tokens=progress.trained_tokens,
        computed_tokens=progress.computed_tokens,
        peak_memory_mb=peak_memory_mb(),
        model_dir=pointed(directory.path, "latest"),
        run_dir=directory.path,
        verdict=verdict,
    )
    write_summary(directory.summary, summary)
    if loop.monitor.line:
        loop.display.message(loop.monitor.line)
    if progress.step:
        for line in after_run(loop.config, directory.path):
            loop.display.message(line)
        loop.journal.flush()
        write_certificate(directory.path)
    draw_reward_curve(directory.metrics, directory.picture, title=directory.path.name)
