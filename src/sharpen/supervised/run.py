"""Puts a run without rollouts together, runs it, and leaves the evidence.

In: a resolved configuration, and the user's workflow and judge if the agent is to be evaluated. Out: the run directory
and a `TuneResult`. Everything that can be checked without loading a model is checked first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.assembly import Opened, best_of, make_evaluator, make_monitor, models_left, open_run
from sharpen.certificate.certificate import write_certificate
from sharpen.config.load import Resolved
from sharpen.decide import decide_rows
from sharpen.execution.start import start_serving, start_training
from sharpen.execution.trainers import AnyTrainer, make_trainer
from sharpen.forecast import after_run
from sharpen.interrupts import stop_signals
from sharpen.monitor.curve import draw_loss_curve, draw_reward_curve
from sharpen.monitor.statistics import Evaluation, by_mode
from sharpen.monitor.summary import Summary, peak_memory_mb, process_seconds, write_summary
from sharpen.monitor.verdict import Candidates, Verdict, judge_losses, judge_rewards
from sharpen.recipe import Job, RowRecipe
from sharpen.result import TuneResult
from sharpen.supervised.data import RowData, make_tutor, read_data

if TYPE_CHECKING:
    from sharpen.execution.run_directory import RunDirectory
    from sharpen.execution.start import Served
    from sharpen.supervised.loop import SupervisedLoop

WITHOUT_EFFECT = (
    *("algorithm.group_size", "sampling.max_refill", "sampling.reward_", "sampling.overlong", "sampling.difficulty"),
    *("sampling.replay", "sampling.max_staleness"),
    *("check.", "critic.", "distill.", "sync.", "taskset."),
)
"""Settings, by how they begin, that mean nothing without rollouts."""
OF_WORKFLOW = (
    *("workflow_args", "rollout.", "auxiliary_models", "judge"),
    *("engine.type", "engine.dtype", "engine.max_slots", "engine.kv_cache_mb"),
    *("model.tensor_parallel_size", "model.inference_engine_num"),
    *("cluster.num_workers", "cluster.rollouts_per_worker", "cluster.colocate"),
)
"""Settings that mean something only where the agent is evaluated."""


def run_supervised(
    resolved: Resolved,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    config_path: Path | None = None,
) -> TuneResult:
    """Run a resolved configuration whose algorithm learns without rollouts. Raises as `tune()`."""
    config = resolved.config
    job = decide_rows(config, workflow, judge)
    algorithm = job.recipe.algorithm
    data = read_data(config, algorithm, workflow is not None)
    lines = (*_idle(resolved, workflow is not None), *data.messages)
    with contextlib.ExitStack() as stack:
        rows = {"train_dataset": data.training, "held_out": data.tasks or data.held_out}
        opened = stack.enter_context(open_run(resolved, config_path, rows, lines))
        from sharpen.execution.shared_weights import publish_adapters_alone

        serving = None if workflow is None else start_serving(job)
        place = start_training(config) if serving is None else serving
        ranks = None
        if place is not None:
            stack.callback(place.close)
            opened.display.message(place.line)
            ranks = place.ranks
        trainer = make_trainer(job, total_steps=opened.total_steps, ranks=ranks)
        stack.callback(trainer.close)
        stack.enter_context(stop_signals())  # once more: Ray sets handlers of its own as it starts
        if serving is not None:
            publish_adapters_alone(serving.engine, trainer)
        loop = _assemble(opened, job, serving, trainer, data)
        stack.callback(loop.monitor.close)
        stack.callback(loop.journal.close)
        verdict = None
        try:
            loop.run()
            verdict = _verdict(loop, opened.directory)
        finally:
            _write_outcome(loop, opened.directory, verdict)
        return _outcome(loop, opened.directory, job.folder, verdict)


def _idle(resolved: Resolved, has_workflow: bool) -> list[str]:
    """One line for the settings that were given and mean nothing here, if there are any."""
    starts = WITHOUT_EFFECT if has_workflow else (*WITHOUT_EFFECT, *OF_WORKFLOW)
    idle = [name for name, origin in resolved.origins.items() if origin != "default" and name.startswith(starts)]
    name = resolved.config.algorithm.algorithm_type
    return [f"without effect in {name}: {', '.join(idle)}"] if idle else []


def _assemble(
    opened: Opened, job: Job[RowRecipe], serving: Served | None, trainer: AnyTrainer, data: RowData
) -> SupervisedLoop:
    from sharpen.execution.model_files import quiet_transformers
    from sharpen.experience.journal import Journal
    from sharpen.supervised.held_out import HeldOut
    from sharpen.supervised.loop import Progress, SupervisedLoop

    config, directory, display, order = opened.config, opened.directory, opened.display, opened.order
    quiet_transformers()
    algorithm = job.recipe.algorithm
    tutor = make_tutor(config, algorithm, job.folder)
    for line in trainer.lines:
        display.message(line)
    progress = Progress(order=order.state())
    if directory.checkpoint is not None:
        progress = Progress.from_json(trainer.restore(directory.checkpoint))
        progress.version = trainer.version
        order.restore(progress.order)
        display.message(f"continuing {directory.path.name} after step {progress.step}")
    journal = Journal(directory.journal)
    journal.begin(progress.step, trainer.version)
    held_out = None
    if data.held_out:
        held_out = HeldOut(
            rows=data.held_out,
            tutor=tutor,
            trainer=trainer,
            algorithm=algorithm,
            batch_size=config.algorithm.batch_size,
        )
    return SupervisedLoop(
        config=config,
        algorithm=algorithm,
        tutor=tutor,
        trainer=trainer,
        rows=data.training,
        order=order,
        journal=journal,
        monitor=make_monitor(config, directory, progress.step, display),
        display=display,
        serving=serving,
        evaluator=None if serving is None else make_evaluator(opened, serving, data.tasks, data.further),
        held_out=held_out,
        run_dir=directory.path,
        total_steps=opened.total_steps,
        progress=progress,
        process_seconds=process_seconds,
    )


def _models(loop: SupervisedLoop, directory: RunDirectory) -> Candidates[Any]:
    """With what they are compared by: rewards of the agent where it was evaluated, else losses of held-out rows."""
    progress = loop.progress
    by_rewards = progress.before is not None or progress.after is not None
    return models_left(
        directory,
        loop.config.model.model_path,
        before=progress.before if by_rewards else progress.rows_before,
        after=progress.after if by_rewards else progress.rows_after,
        best=progress.found_at_best if by_rewards else progress.rows_at_best,
        num_evaluated=progress.num_evaluated,
    )


def _verdict(loop: SupervisedLoop, directory: RunDirectory) -> Verdict:
    models = _models(loop, directory)
    if isinstance(models.before, Evaluation):
        return judge_rewards(models, loop.config.evaluation.decided_by)
    return judge_losses(models)


def _write_outcome(loop: SupervisedLoop, directory: RunDirectory, verdict: Verdict | None) -> None:
    from sharpen.trainer.checkpoint import pointed

    progress = loop.progress
    measured = {"before": progress.loss_before, "after": progress.loss_after}
    summary = Summary(
        before=progress.before,
        after=progress.after,
        seconds=process_seconds(),
        seconds_to_first_step=progress.seconds_to_first_step,
        steps=progress.step,
        rollouts=0,
        sampled_tokens=0,
        trained_tokens=progress.trained_tokens,
        computed_tokens=progress.computed_tokens,
        peak_memory_mb=peak_memory_mb(),
        model_dir=pointed(directory.path, "latest"),
        run_dir=directory.path,
        held_out={name: numbers for name, numbers in measured.items() if numbers is not None},
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
    draw_loss_curve(directory.metrics, directory.path / "loss_curve.png", title=directory.path.name)
    if loop.evaluator is not None:
        draw_reward_curve(directory.metrics, directory.picture, title=directory.path.name)


def _outcome(loop: SupervisedLoop, directory: RunDirectory, folder: Path, verdict: Verdict) -> TuneResult:
    models = _models(loop, directory)
    progress, display = loop.progress, loop.display
    if progress.before is not None and progress.after is not None:
        display.table(progress.before, progress.after)
    if progress.loss_before is not None and progress.loss_after is not None:
        lines = [
            f"held-out {name}: {value:.4f} -> {progress.loss_after[name]:.4f}"
            for name, value in progress.loss_before.items()
            if name in ("loss", "accuracy", "margin")
        ]
        display.message("\n".join(["", *lines]))
    if progress.rows_too_long:
        display.message(
            f"{progress.rows_too_long} rows were left out: longer than model.max_model_len "
            f"({loop.config.model.max_model_len} tokens)"
        )
    picture = directory.picture if loop.evaluator is not None else None
    display.message(f"loss curve:    {directory.path / 'loss_curve.png'}")
    display.usage(directory.path, verdict, picture, tensorboard=loop.config.monitor_type == "tensorboard")
    return TuneResult(
        run_dir=directory.path,
        verdict=verdict,
        model_dir=models.last.folder,
        best_model_dir=best_of(directory, models, folder),
        before=by_mode(progress.before),
        after=by_mode(progress.after),
        rewards_before=progress.before,
        rewards_after=progress.after,
        steps=progress.step,
        loss_before=None if progress.loss_before is None else progress.loss_before["loss"],
        loss_after=None if progress.loss_after is None else progress.loss_after["loss"],
    )
