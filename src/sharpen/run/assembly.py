"""Build a run that learns from rollouts or from rows, and close its parts at the end.

In: a resolved configuration and the user's functions. Out: a `Loop` that has not run yet, and its `Site`. Everything
that can be checked without loading a model is checked first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.agent.rollout.user_loop import owner
from sharpen.agent.tasks.data import RunData
from sharpen.agent.tasks.order import Order, make_order
from sharpen.config.distill import setting_of_teacher
from sharpen.config.load import CHOSEN, ResolvedConfig, shown_settings
from sharpen.config.problems import doubtful
from sharpen.contracts import MonitoredRun
from sharpen.errors import ConfigError, JournalError
from sharpen.evidence.certificate.sources import source_identities
from sharpen.interrupts import stop_signals
from sharpen.learning.recipe import Recipe, RolloutRecipe, RowRecipe, TrainingJob
from sharpen.learning.supervised.data import make_tutor, read_data
from sharpen.machine import let_idle_workers_sleep, return_freed_bytes
from sharpen.models.files import model_folder
from sharpen.models.identity import Identity, model_identity
from sharpen.placement.local import start_serving, start_training
from sharpen.placement.place import Serving
from sharpen.placement.probe import probe_at_start
from sharpen.placement.trainers import AnyTrainer, make_trainer
from sharpen.run.data import read_expert_only, read_tasks
from sharpen.run.decide import decide
from sharpen.run.evaluation import Transcripts
from sharpen.run.expert import ExpertRows, make_expert_rows
from sharpen.run.forecast import Forecast, settle
from sharpen.run.identity import parts_identities, rows_identity
from sharpen.run.progress import Progress
from sharpen.run.receiver import Inbox, open_inbox
from sharpen.run.stall import StallWatch
from sharpen.show.monitor.display import Display
from sharpen.show.monitor.metrics import Monitor, open_monitor
from sharpen.show.monitor.stream import lasting_output
from sharpen.show.monitor.summary import run_clock
from sharpen.types import Experience, Task

if TYPE_CHECKING:
    from sharpen.evidence.certificate.gradient_probe import GradientProbe
    from sharpen.learning.algorithm.distill import Distill
    from sharpen.learning.experience.journal import Journal
    from sharpen.learning.supervised.held_out import HeldOut
    from sharpen.learning.supervised.lessons import Tutor
    from sharpen.placement.teacher_endpoint import TeacherEndpoint
    from sharpen.run.directory import RunDirectory
    from sharpen.run.evaluation import Evaluator
    from sharpen.run.loop import Loop
    from sharpen.run.repeats import Repeats
    from sharpen.run.rollouts import RolloutSource, Supply
    from sharpen.run.rows import RowSource

_ROLLOUTS_ONLY = (
    *("algorithm.group_size", "sampling.max_refill", "sampling.reward_", "sampling.overlong", "sampling.difficulty"),
    *("sampling.replay", "sampling.max_staleness", "sampling.operators"),
    *("sampling.length_penalty", "sampling.turns_penalty"),
    *("check.", "critic.", "distill.", "sync.", "monitor_rollouts", "journal."),
)
"""Prefixes of the settings that have no effect without rollouts."""
_AGENT_ONLY = (
    *("workflow_args", "task_args", "rollout.", "auxiliary_models", "judge"),
    *("engine.type", "engine.dtype", "engine.max_slots", "engine.kv_cache_mb"),
    *("model.tensor_parallel_size", "model.inference_engine_num"),
    *("cluster.num_workers", "cluster.rollouts_per_worker", "cluster.colocate"),
)
"""Prefixes of the settings that have an effect only if the agent runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a run has before a model is loaded: the job, the data and their order, the directory and the display."""

    job: TrainingJob
    data: RunData
    order: Order | None
    inbox: Inbox | None
    total_steps: int
    directory: RunDirectory
    display: Display
    transcripts: Transcripts
    clock: Callable[[], float]
    teacher: TeacherEndpoint | None = None


@contextlib.contextmanager
def open_loop(
    resolved: ResolvedConfig,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    config_path: Path | None = None,
    display: Display | None = None,
) -> Iterator[tuple[Loop, Site]]:
    """Check the configuration, build the run's parts and close them at the end. Training has not begun when this
    yields. `display` is that of the run, if it has begun already. Raises what `tune()` raises."""
    if resolved.config.mode == "explore":
        raise ConfigError(
            "mode is 'explore', which trains nothing: `sharpen run --config FILE` explores, with the agent named in "
            "the file as `workflow: agent.py:run`"
        )
    if resolved.evaluate_only:
        raise ConfigError(
            f"{config_path}: mode is 'bench', which evaluates and does not train: use `sharpen eval --config "
            f"{config_path}`, or mode both"
        )
    clock = run_clock()
    let_idle_workers_sleep()  # torch is loaded from here on
    from sharpen.run.directory import chosen_before

    decided = decide(resolved.config, workflow, judge)
    data = _read_data(decided)
    evaluated = max(map(len, (data.tasks, *data.further.values())))
    forecast = settle(decided, chosen_before(resolved.config), evaluated)
    job, resolved = forecast.job, resolved.choose(forecast.chosen)
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(open_site(resolved, config_path, forecast, data, display, clock=clock))
        site.display.doing(f"loading the model {job.config.model.model_path}")
        serving = None if job.workflow is None else start_serving(job)
        place = serving if serving is not None else start_training(job)
        if place is not None:
            stack.callback(place.close)
            site.display.message(place.line)
        trainer = make_trainer(
            job,
            total_steps=site.total_steps,
            ranks=None if place is None else place.ranks,
            probe=_probe(site, serving),
            engine=None if serving is None else serving.engine,
        )
        stack.callback(trainer.close)
        return_freed_bytes()  # what loading took
        stack.enter_context(stop_signals())  # again: Ray installs its own handlers when it starts
        loop = assemble(site, serving, trainer)
        stack.callback(loop.monitor.close)
        stack.enter_context(_closing(loop.journal))
        site.display.doing("")
        stack.enter_context(_stall_watch(site, serving))
        yield loop, site


@contextlib.contextmanager
def _stall_watch(site: Site, serving: Serving | None) -> Iterator[None]:
    """Watch whether the run stands still, if it is to be watched."""
    config = site.job.config
    if config.stall_report_s is None:
        yield
        return
    watch = StallWatch(
        config.stall_report_s,
        lambda: (site.display.num_events, 0 if serving is None else serving.num_answered()),
        site.directory.path / "stalled.txt",
        "the run goes on. Ctrl-C ends it and saves the last whole step; a rollout ends after rollout.timeout_s "
        f"({config.rollout.timeout_s:g} s)",
    )
    with contextlib.closing(watch):
        yield


@contextlib.contextmanager
def _closing(journal: Journal) -> Iterator[None]:
    """Close the journal at the end. If an error ends the run, that one is raised, and not what it leads to."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(JournalError):
            journal.close()
        raise
    journal.close()


@contextlib.contextmanager
def open_site(
    resolved: ResolvedConfig,
    config_path: Path | None,
    forecast: Forecast,
    data: RunData,
    display: Display | None = None,
    *,
    clock: Callable[[], float],
) -> Iterator[Site]:
    """Create or reopen the run's directory and print the notices. Raises what `open_run_directory` raises."""
    from sharpen.run.directory import open_run_directory

    job, config = forecast.job, forecast.job.config
    rows = {"train_dataset": data.training, "held_out": data.held_out, "expert": data.expert}
    identities = {name: rows_identity(some) for name, some in rows.items() if some}
    identities["model"] = model_identity(job.folder)
    for name, path in config.distill.models.items():
        setting = setting_of_teacher(name)
        identities[setting if name else "teacher"] = model_identity(model_folder(path, setting=setting))
    identities |= {**source_identities(config), **parts_identities(config)}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(open_run_directory(resolved, config_path, identities, data.training))
        stack.enter_context(stop_signals())
        stack.enter_context(lasting_output(owner.get))
        order, inbox, total_steps = _open_supply(job.recipe, data, directory.path, identities["model"])
        display = stack.enter_context(contextlib.closing(display or Display(total_steps, sys.stdout)))
        display.set_total_steps(total_steps)
        teacher = _teacher(job)
        if teacher is not None:
            stack.callback(teacher.close)
        transcripts = stack.enter_context(contextlib.closing(Transcripts(directory.evaluations)))
        for line in (
            *resolved.notices,
            *resolved.overrides,
            *job.notices,
            *directory.notes,
            *_unused_settings(resolved, job),
            *doubtful(config, num_tasks=len(data.training), total_steps=total_steps),
            *data.messages,
        ):
            display.message(line)
        for line in forecast.begin(directory.path):
            display.message(line)
        yield Site(
            job=job,
            data=data,
            order=order,
            inbox=inbox,
            total_steps=total_steps,
            directory=directory,
            display=display,
            transcripts=transcripts,
            clock=clock,
            teacher=teacher,
        )


def _teacher(job: TrainingJob) -> TeacherEndpoint | None:
    """Return the teacher behind an endpoint, which has answered; None if there is none."""
    recipe = job.recipe
    if not isinstance(recipe, RolloutRecipe) or job.config.distill.teacher_url is None:
        return None
    from sharpen.placement.teacher_endpoint import TeacherEndpoint

    return TeacherEndpoint.open(job.config.distill, job.folder, job.config.model.max_model_len)


def _open_supply(
    recipe: Recipe, data: RunData, run_dir: Path, model: Identity
) -> tuple[Order | None, Inbox | None, int]:
    """Return the order of the training set, or the inbox of a trainer whose explorer has that order; and the steps of
    the run. Raises `DatasetError` for a task without what the settings ask it for."""
    config = recipe.config
    if isinstance(recipe, RolloutRecipe) and recipe.algorithm.by_role:
        for task in data.training:
            recipe.algorithm.role_of(task)
    if isinstance(recipe, RolloutRecipe) and recipe.algorithm.distill is not None:
        _check_tasks(data.training, recipe.algorithm.distill, config.distill.context)
    if config.mode == "train":
        inbox = open_inbox(config, run_dir, model, lambda line: print(line, flush=True))
        there = inbox.announcement.total_steps
        return None, inbox, min(config.train_dataset.total_steps or there, there)
    order = make_order(data.training, config.sampling, seed=config.seed, batch_size=config.algorithm.batch_size)
    total_steps = config.train_dataset.total_steps or order.num_batches(config.train_dataset.total_epochs)
    return order, None, total_steps


def _check_tasks(tasks: Sequence[Task], distill: Distill, context: str | None) -> None:
    """Raise `DatasetError` for a task without a teacher, or without what the teacher is told of it."""
    from sharpen.learning.experience.told import check_told

    for task in tasks:
        distill.teacher_of(task)
        if context is not None:
            check_told(task, context)


def assemble(site: Site, serving: Serving | None, trainer: AnyTrainer) -> Loop:
    """Build the loop of a new run, or of one that continues from its checkpoint."""
    from sharpen.learning.experience.journal import Journal
    from sharpen.models.files import quiet_transformers
    from sharpen.run.evaluation import Exam
    from sharpen.run.loop import Loop

    quiet_transformers()
    directory, display, recipe = site.directory, site.display, site.job.recipe
    expert = None
    if isinstance(recipe, RolloutRecipe):
        expert = make_expert_rows(recipe.config, recipe.algorithm, site.data.expert, site.job.folder)
    progress = _restore(site, serving, trainer, expert)
    _connect_weights(site, serving, trainer, progress.step)
    journal = Journal(directory.journal)
    journal.begin(progress.step, trainer.version)
    if trainer.rounding is not None:
        journal.add_parity(trainer.rounding.to_json())
    monitor, held_out = _monitor(site, progress.step), None
    source: RolloutSource | RowSource
    if isinstance(recipe, RolloutRecipe):
        source = _rollouts(site, recipe, serving, trainer, journal, progress, expert)
    else:
        source = _rows(site, recipe, serving, trainer, journal)
        held_out = _held_out(site, recipe, source.tutor, trainer, journal)
    evaluator = None if serving is None or not site.data.tasks else _evaluator(site, serving)
    return Loop(
        config=recipe.config,
        source=source,
        trainer=trainer,
        serving=serving,
        exam=Exam(evaluator=evaluator, held_out=held_out, serve=source.serve, monitor=monitor, display=display),
        journal=journal,
        transcripts=site.transcripts,
        monitor=monitor,
        display=display,
        run_dir=directory.path,
        total_steps=site.total_steps,
        progress=progress,
        run_seconds=site.clock,
        repeats=_repeats(site, trainer, journal),
    )


def _repeats(site: Site, trainer: AnyTrainer, journal: Journal) -> Repeats | None:
    """Return what has steps made once more, if the settings want it."""
    from sharpen.evidence.certificate.plain.retrain import memory_bytes
    from sharpen.evidence.certificate.plain.saved_state import num_weights
    from sharpen.machine import available_bytes
    from sharpen.run.repeats import Repeats, Size

    config = site.job.config
    if config.certificate.retrain == "off":
        return None
    return Repeats(
        trainer,
        journal,
        site.directory.path,
        Size(
            num_weights=num_weights(site.job.folder),
            needed=memory_bytes(site.job.folder),
            free=available_bytes(),
        ),
        checkpoint=site.directory.checkpoint,
        total_steps=site.total_steps,
        time_limit_s=config.time_limit_s,
        stop=config.certificate.on_violation == "stop",
        say=site.display.message,
        probe=lambda: gradients_at_the_end(site, trainer),
    )


def gradients_at_the_end(site: Site, trainer: AnyTrainer) -> GradientProbe:
    """Compare the trainer's gradients at its last weights, which are those of the latest checkpoint."""
    from sharpen.learning.trainer.checkpoint import pointed

    return gradients_of_checkpoint(site, trainer, pointed(site.directory.path, "latest"))


def gradients_of_checkpoint(site: Site, trainer: AnyTrainer, checkpoint: Path | None) -> GradientProbe:
    """Compare the trainer's gradients at its weights, which are those of a checkpoint (None: those before training);
    adapters have the model's files beside them."""
    from sharpen.evidence.certificate.gradient_probe import GradientProbe, probe_gradients

    config, before = site.job.config, site.job.folder
    if checkpoint is None or checkpoint == before:
        return probe_gradients(config, before, trainer)
    at = trainer.gradients([], ())
    if at.critic_weights:
        return GradientProbe(not_probed="a critic that has learned is in no model's files")
    if config.trainer.lora is not None:
        return probe_gradients(config, before, trainer)
    if at.rounded:
        return GradientProbe(not_probed="in bfloat16 the last weights are in no model's files as they are")
    return probe_gradients(config, checkpoint, trainer, reference=before)


def _read_data(job: TrainingJob) -> RunData:
    if isinstance(job.recipe, RolloutRecipe):
        return read_tasks(job.recipe) if job.config.mode == "both" else read_expert_only(job.recipe)
    return read_data(job.config, job.recipe.algorithm, job.workflow is not None)


def _unused_settings(resolved: ResolvedConfig, job: TrainingJob) -> list[str]:
    """Return a line that lists the given settings that have no effect in a run that learns from rows, if any."""
    if isinstance(job.recipe, RolloutRecipe):
        return []
    starts = _ROLLOUTS_ONLY if job.workflow is not None else (*_ROLLOUTS_ONLY, *_AGENT_ONLY)
    idle = [
        name
        for name, origin in resolved.origins.items()
        if origin not in ("default", CHOSEN) and name.startswith(starts)
    ]
    return [f"without effect in {job.recipe.algorithm.name}: {', '.join(idle)}"] if idle else []


def _probe(site: Site, serving: Serving | None) -> Sequence[Experience]:
    """Return calls of the untrained engine, to compare the trainer with; none for a run that learns from rows."""
    if site.inbox is not None:
        return site.inbox.announcement.probe
    if serving is None or isinstance(site.job.recipe, RowRecipe):
        return ()
    return probe_at_start(site.job, serving, site.data.training)


def _restore(site: Site, serving: Serving | None, trainer: AnyTrainer, expert: ExpertRows | None) -> Progress:
    """Restore every part that has a state from the checkpoint, and return how far the run is. A new run records how it
    begins."""
    if site.directory.checkpoint is None:
        trainer.save_start(site.directory.path)
        order = {} if site.order is None else site.order.state()
        return Progress(order=order, expert={} if expert is None else expert.state())
    progress = Progress.from_json(trainer.restore(site.directory.checkpoint))
    if site.order is not None:
        site.order.restore(progress.order)
    if expert is not None:
        expert.restore(progress.expert)
    if serving is not None:
        serving.auxiliary.restore(progress.auxiliary_tokens)
    return replace(progress, version=trainer.version)


def _connect_weights(site: Site, serving: Serving | None, trainer: AnyTrainer, step: int) -> None:
    """Choose how the trainer's weights reach the engine, and serve the weights of a continued run."""
    from sharpen.placement.snapshots import keep_snapshots
    from sharpen.placement.trainers import publish_unmerged_adapters, share_weights

    recipe = site.job.recipe
    if serving is not None:
        publish_unmerged_adapters(serving.engine, trainer)
        keep_snapshots(serving, trainer, recipe.config.policies, site.directory.checkpoint)
        if isinstance(recipe, RolloutRecipe) and not recipe.overlaps:
            share_weights(serving.engine, trainer)
    if site.directory.checkpoint is not None:
        line = f"continuing {site.directory.path.name} after step {step}"
        if step >= site.total_steps:
            line = f"{site.directory.path.name} is complete: all {site.total_steps} steps are trained"
        site.display.message(line)
        if serving is not None:
            serving.publish(trainer.version, trainer.state_tensors())
    for line in trainer.lines:
        site.display.message(line)


def _rollouts(
    site: Site,
    recipe: RolloutRecipe,
    serving: Serving | None,
    trainer: AnyTrainer,
    journal: Journal,
    progress: Progress,
    expert: ExpertRows | None,
) -> RolloutSource:
    from sharpen.evidence.certificate.role_baselines import RoleBaselines
    from sharpen.evidence.diagnose.diagnosis import Watch
    from sharpen.learning.experience.replay import Replay
    from sharpen.learning.experience.reread import Rereading
    from sharpen.learning.experience.told import Told
    from sharpen.run.rollouts import RolloutSource

    replay = None if recipe.replay is None else Replay(recipe.replay)
    if replay is not None and site.directory.checkpoint is not None:
        replay.restore(site.directory.journal, recipe.algorithm, step=progress.step, version=trainer.version)
    if recipe.overlaps and site.inbox is None:
        site.display.message(recipe.schedule.line)
    return RolloutSource(
        recipe=recipe,
        serving=serving,
        trainer=trainer,
        supply=_supply(site, recipe, serving, trainer, progress),
        journal=journal,
        display=site.display,
        watch=Watch(recipe),
        expert=expert,
        replay=replay,
        teacher=site.teacher,
        told=Told.of(recipe.config.distill.context, site.job.folder, [*site.job.teachers.values()]),
        rereading=Rereading.of(
            recipe.algorithm.distill,
            site.job.folder,
            {name: site.job.teachers[name] for name in sorted(site.job.read_anew)},
            recipe.config.model.enable_thinking,
            recipe.config.rollout.max_excluded_share,
        ),
        baselines=RoleBaselines(progress.roles),
    )


def _supply(
    site: Site, recipe: RolloutRecipe, serving: Serving | None, trainer: AnyTrainer, progress: Progress
) -> Supply:
    from sharpen.run.explorer import Explorer
    from sharpen.run.receiver import Receiver

    if site.inbox is not None:
        bound = recipe.config.sync.max_staleness
        age = (
            "of any age (sync.max_staleness bounds it)" if bound is None else f"at most {bound} policy versions behind"
        )
        site.display.message(f"rollouts come from {site.inbox.store.where}, {age}")
        return Receiver(
            site.inbox,
            recipe.schedule,
            total_steps=site.total_steps,
            display=site.display,
            trainer=trainer,
            trained=progress.step,
        )
    assert serving is not None
    assert site.order is not None
    return Explorer(
        recipe,
        serving=serving,
        tasks=site.data.training,
        order=site.order,
        total_steps=site.total_steps,
        display=site.display,
        trained=progress.step,
        version=trainer.version,
        drawn=progress.drawn,
    )


def _rows(site: Site, recipe: RowRecipe, serving: Serving | None, trainer: AnyTrainer, journal: Journal) -> RowSource:
    from sharpen.run.rows import RowSource

    def publish() -> None:
        if serving is not None:
            serving.publish(trainer.version, trainer.state_tensors())

    assert site.order is not None
    return RowSource(
        recipe=recipe,
        rows=site.data.training,
        order=site.order,
        tutor=make_tutor(recipe.config.model, recipe.config.supervised, recipe.algorithm.data, site.job.folder),
        trainer=trainer,
        journal=journal,
        display=site.display,
        serve=publish,
    )


def _held_out(site: Site, recipe: RowRecipe, tutor: Tutor, trainer: AnyTrainer, journal: Journal) -> HeldOut | None:
    """Return the held-out rows whose loss is measured, after adding them to the journal."""
    from sharpen.learning.supervised.batches import HELD_OUT, held_out_row
    from sharpen.learning.supervised.held_out import HeldOut

    if not site.data.rows:
        return None
    journal.add_taught(HELD_OUT, map(held_out_row, site.data.rows))
    return HeldOut(
        rows=site.data.rows,
        tutor=tutor,
        trainer=trainer,
        algorithm=recipe.algorithm,
        batch_size=recipe.config.algorithm.batch_size,
    )


def _monitor(site: Site, step: int) -> Monitor:
    """Open the configured monitor. A continued run logs on after `step`; warnings go to the display."""
    config, directory = site.job.config, site.directory
    run = MonitoredRun(
        run_dir=directory.path,
        project=config.project,
        name=directory.path.name,
        settings=shown_settings(config),
        resume_step=step if directory.checkpoint is not None else None,
    )
    return open_monitor(run, config.monitor_type, site.display.message)


def _evaluator(site: Site, serving: Serving) -> Evaluator:
    """Return the evaluator of the served model on the held-out tasks and on the named further sets."""
    from sharpen.run.evaluation import Evaluator

    return Evaluator(
        config=site.job.config,
        runner=serving.runner,
        modes=serving.modes,
        tasks=site.data.tasks,
        further=site.data.further,
        progress=site.display.evaluation,
        message=site.display.message,
        keep=site.transcripts.add,
    )
