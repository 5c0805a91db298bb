"""The check before training: run a few tasks through agent and judge, and report whether they give a training signal;
and compare the trainer's gradient of a small batch with a plain loop's.

In: a configuration and the user's functions (`sharpen check`), or a run that is about to start. Out: a `CheckReport`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from sharpen.agent.rollout.check import UNCALLED, CheckReport, check_groups, differing
from sharpen.config.load import ResolvedConfig
from sharpen.errors import ConfigError, NoSignalError, RolloutError
from sharpen.evidence.certificate.gradient_probe import ADVICE, GradientProbe, probe_gradients, reason_against
from sharpen.learning.algorithm.supervised import learns_from_rows
from sharpen.learning.experience.evidence import read_gradients
from sharpen.learning.experience.records import CHECK
from sharpen.learning.recipe import Job, RolloutRecipe, RowRecipe
from sharpen.machine import let_idle_workers_sleep, trained_on
from sharpen.placement.local import start_serving
from sharpen.placement.place import Serving
from sharpen.placement.trainers import make_trainer
from sharpen.run.assembly import Site, gradients_of_checkpoint
from sharpen.run.data import read_tasks
from sharpen.run.decide import decide_rollouts
from sharpen.run.judging import check_floor
from sharpen.run.loop import Loop
from sharpen.show.monitor.display import Display
from sharpen.types import Group, Task


def check_config(
    resolved: ResolvedConfig,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    display: Display,
) -> CheckReport:
    """Run a few tasks through agent and judge, and report whether they give a training signal. Raises `ConfigError` for
    an algorithm that learns from rows. On a terminal `display` shows how far it is. The trainer is loaded beside the
    engine, as in a run, to compare its gradients."""
    config = resolved.config
    if learns_from_rows(config.algorithm):
        raise ConfigError(
            f"{config.algorithm.algorithm_type!r} learns from rows, not from rollouts: there is nothing to check"
        )
    job = decide_rollouts(config, workflow, judge)
    check_floor(config, judge, display.message)
    tasks = read_tasks(job.recipe).training[: config.check.num_tasks]
    let_idle_workers_sleep()
    display.doing(f"loading the model {config.model.model_path}")
    serving = start_serving(job)
    try:
        display.doing("")
        report = _run_check(job.recipe, serving, tasks, version=0, display=display)
        if config.mode != "both" or not config.check.gradients:
            return report
        return with_gradients(report, _probe_alone(job, serving, display))
    finally:
        serving.close()


def check_first(loop: Loop, site: Site) -> None:
    """Check a new run: its gradients, then a few tasks, whose rollouts are kept; print the findings. Of a run that goes
    on check the gradients, unless the same machine compared them before. Raises `GradientError` if gradients are not
    those of a plain loop, `RolloutError` if every rollout failed, `NoSignalError` if no rollout called the model, if no
    call could be trained on any task, or if all rewards were equal and `check.stop_without_signal` is on."""
    recipe, settings = site.job.recipe, site.job.config.check
    if not settings.enabled:
        return
    if settings.gradients:
        _compare_gradients(loop, site)
    if loop.progress.step:
        return
    if isinstance(recipe, RowRecipe) or loop.serving is None:
        return
    tasks = site.data.training[: settings.num_tasks]
    report = _run_check(
        recipe,
        loop.serving,
        tasks,
        version=loop.trainer.version,
        display=site.display,
        keep=site.transcripts.add,
    )
    loop.serving.rest()
    for line in _summary_lines(report):
        site.display.message(line)
    if report.all_failed:
        raise RolloutError(f"check: {report.all_failed}")
    if report.uncalled:
        raise NoSignalError(f"check: {UNCALLED}")
    if report.statistics.mean_calls and not report.trains:
        raise NoSignalError("check: no call can be trained, so a run would change nothing (see the lines above)")
    if not report.has_signal and settings.stop_without_signal:
        raise NoSignalError(
            "check: in no task did the rewards of answered rollouts differ, so there is nothing to learn from; "
            "check.stop_without_signal: false trains anyway"
        )


def _compare_gradients(loop: Loop, site: Site) -> None:
    """Compare the trainer's gradients, and record what was found. Raises `GradientError`."""
    step, machine = loop.progress.step, trained_on()
    if step and (before := read_gradients(loop.journal.path)) and before[-1][2]["machine"] == machine:
        site.display.message(
            f"check: gradients: compared before step {before[-1][0] + 1}, on this machine as it is now"
        )
        return
    site.display.doing("comparing gradients")
    if step:
        found = gradients_of_checkpoint(site, loop.trainer, site.directory.checkpoint)
    else:
        found = probe_gradients(site.job.config, site.job.folder, loop.trainer)
    site.display.doing("")
    loop.journal.add_gradients(step, {**found.to_json(), "machine": machine})
    found.check()
    site.display.message(f"check: gradients: {found.line}")


def _probe_alone(job: Job[RolloutRecipe], serving: Serving, display: Display) -> GradientProbe:
    """Load the trainer of a run that does not begin, and probe it."""
    display.doing("comparing gradients")
    if reason := reason_against(job.config, job.folder, trainer_is_loaded=False):
        return GradientProbe(not_probed=reason)
    trainer = make_trainer(job, total_steps=1, ranks=serving.ranks)
    try:
        return probe_gradients(job.config, job.folder, trainer)
    finally:
        trainer.close()
        display.doing("")


def with_gradients(report: CheckReport, found: GradientProbe) -> CheckReport:
    """Add what a gradient probe found to a report, which is not ready if something is wrong."""
    if found.problem:
        findings = (f"{found.problem}. {ADVICE}", *report.findings)
        return replace(report, gradients="not those of a plain loop", findings=findings, ready=False)
    return replace(report, gradients=found.line)


def _run_check(
    recipe: RolloutRecipe,
    serving: Serving,
    tasks: Sequence[Task],
    *,
    version: int,
    display: Display,
    keep: Callable[[Group], None] | None = None,
) -> CheckReport:
    started, done = time.perf_counter(), count(1)
    names, total = [f"{CHECK}/{task.id}" for task in tasks], len(tasks) * recipe.config.algorithm.group_size
    display.checking(0, total)
    groups = serving.runner.run(
        tasks, group_ids=names, version=version, on_rollout=lambda _: display.checking(next(done), total)
    )
    display.checking(total, total)
    if keep is not None:
        for group in groups:
            keep(group)
    seconds = time.perf_counter() - started
    report = check_groups(
        groups,
        needs_reward=recipe.needs_reward,
        needs_ratio=recipe.algorithm.needs_ratio,
        model=recipe.config.model,
    )
    rollouts_per_step = recipe.config.algorithm.batch_size * recipe.config.algorithm.group_size
    share = rollouts_per_step / max(1, report.statistics.num_rollouts)
    return replace(report, step_s=seconds * max(1.0, share))


def _summary_lines(report: CheckReport) -> list[str]:
    stats = report.statistics
    rewards = (
        f"reward {stats.reward_mean:.3f}, {differing(stats)}" if not math.isnan(stats.reward_mean) else "no reward"
    )
    line = (
        f"check: {stats.num_rollouts} rollouts of {stats.num_groups} tasks, {rewards}, {report.pace}: "
        f"{'ready' if report.ready else 'not ready'}"
    )
    return [line, *(f"  ! {finding}" for finding in report.findings)]
