"""The results of a run: the verdict, the files that it writes at its end (also after a failure) and `TuneResult`.

In: a loop that has run, and its site. Out: the summary, the plan's error, the certificate and the curves in the run
directory; a `TuneResult`.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from sharpen.evidence.certificate.certificate import recorded_certificate, write_certificate
from sharpen.evidence.certificate.certify import with_verdict
from sharpen.evidence.ended import Ended
from sharpen.learning.recipe import RowRecipe
from sharpen.learning.trainer.checkpoint import pointed, step_of
from sharpen.placement.model_formats import model_formats, serve_options
from sharpen.run.assembly import Site
from sharpen.run.directory import RunDirectory
from sharpen.run.forecast import after_run
from sharpen.run.loop import Loop
from sharpen.run.progress import Measurement, Progress
from sharpen.run.result import TuneResult
from sharpen.show.monitor.curve import draw_loss_curve, draw_reward_curve
from sharpen.show.monitor.statistics import by_mode, distinct_rewards
from sharpen.show.monitor.summary import Summary, peak_memory_mb, write_summary
from sharpen.show.monitor.verdict import Candidates, Checkpoint, Verdict, judge_losses, judge_rewards

_NOTHING = Measurement()
_SHOWN = ("loss", "accuracy", "margin")
"""The metrics of held-out rows that are shown at the end."""


def judge_run(loop: Loop, site: Site) -> Verdict:
    """Judge whether the run made the model better: by the agent's rewards if it was evaluated, else by the losses of
    held-out rows."""
    if isinstance(site.job.recipe, RowRecipe) and not _has_rewards(loop.progress):
        return judge_losses(_candidates(loop, site, "rows"))
    return judge_rewards(_candidates(loop, site, "rewards"), site.job.config.evaluation.decided_by)


def write_outcome(loop: Loop, site: Site, verdict: Verdict | None, error: BaseException | None = None) -> None:
    """Write the files of the results so far; `verdict` is None if the run has not ended, and `error` ended it early."""
    progress, directory, display = loop.progress, site.directory, site.display
    display.doing("writing the results", alone=True)
    before, after = progress.before or _NOTHING, progress.after or _NOTHING
    summary = Summary(
        before=before.rewards,
        after=after.rewards,
        seconds=loop.run_seconds(),
        seconds_to_first_step=progress.seconds_to_first_step,
        steps=progress.step,
        rollouts=progress.rollouts,
        sampled_tokens=progress.sampled_tokens,
        trained_tokens=progress.trained_tokens,
        computed_tokens=progress.computed_tokens,
        peak_memory_mb=peak_memory_mb(),
        model_dir=pointed(directory.path, "latest"),
        run_dir=directory.path,
        held_out={
            name: numbers for name, numbers in (("before", before.loss), ("after", after.loss)) if numbers is not None
        },
        verdict=verdict,
        error=None if error is None else Ended.by(error),
    )
    write_summary(directory.summary, summary)
    if loop.monitor.line:
        display.message(loop.monitor.line)
    if progress.step:
        for line in after_run(site.job, directory.path):
            display.message(line)
        loop.journal.flush()
        loop.transcripts.flush()
        certificate = with_verdict(recorded_certificate(directory.path), directory.path, site.job.config)
        write_certificate(directory.path, certificate)
        if not certificate.holds:
            display.message(
                f"NOT CERTIFIED: {certificate.problems[0]} ({len(certificate.problems)} problems; all of them: sharpen "
                f"certify {directory.path})"
            )
    if isinstance(site.job.recipe, RowRecipe):
        draw_loss_curve(directory.metrics, directory.loss_picture, title=_title(site, verdict))
    if _reward_picture(loop, site) is not None:
        draw_reward_curve(directory.metrics, directory.picture, title=_title(site, verdict))


def _title(site: Site, verdict: Verdict | None) -> str:
    """Return the title of a curve: the run, its model and algorithm; below it the verdict."""
    config = site.job.config
    head = f"{site.directory.path.name}: {Path(config.model.model_path).name}, {config.algorithm.algorithm_type}"
    return head if verdict is None else "\n".join([head, *textwrap.wrap(f"verdict: {verdict.text}", 90)[:2]])


def result(loop: Loop, site: Site, verdict: Verdict) -> TuneResult:
    """Display the results of a run that has ended, and return them."""
    progress, directory, display = loop.progress, site.directory, site.display
    before, after = progress.before or _NOTHING, progress.after or _NOTHING
    if before.rewards is not None and after.rewards is not None:
        display.table(before.rewards, after.rewards)
    if before.loss is not None and after.loss is not None:
        lines = [
            f"held-out {name}: {value:.4f} -> {after.loss[name]:.4f}"
            for name, value in before.loss.items()
            if name in _SHOWN
        ]
        display.message("\n".join(["", *lines]))
    if progress.rows_too_long:
        display.message(
            f"{progress.rows_too_long} rows were left out: longer than model.max_model_len "
            f"({site.job.config.model.max_model_len} tokens)"
        )
    if isinstance(site.job.recipe, RowRecipe):
        display.message(f"loss curve:    {directory.loss_picture}")
    display.usage(
        directory.path,
        verdict,
        _reward_picture(loop, site),
        tensorboard=site.job.config.monitor_type == "tensorboard",
        options=serve_options(model_formats(site.job.config.model, site.job.folder)),
    )
    last = pointed(directory.path, "latest")
    assert last is not None, "the last step is always saved"
    among = distinct_rewards(before.rewards, after.rewards)
    return TuneResult(
        run_dir=directory.path,
        verdict=verdict,
        model_dir=last,
        best_model_dir=_best_model(progress, directory, site.job.folder, last),
        before=by_mode(before.rewards, among=among),
        after=by_mode(after.rewards, among=among),
        rewards_before=before.rewards,
        rewards_after=after.rewards,
        steps=progress.step,
        loss_before=None if before.loss is None else before.loss["loss"],
        loss_after=None if after.loss is None else after.loss["loss"],
    )


def end_early(loop: Loop, site: Site) -> None:
    """Say where a run is that an interrupt or an error ended, and how it goes on."""
    directory = site.directory
    saved = pointed(directory.path, "latest")
    site.display.stopped(
        directory.path,
        step=None if saved is None else step_of(saved),
        trained=loop.progress.step,
        named=site.job.config.name is not None,
    )


def _has_rewards(progress: Progress) -> bool:
    return any(found is not None and found.rewards is not None for found in (progress.before, progress.after))


def _reward_picture(loop: Loop, site: Site) -> Path | None:
    """Return the path of the reward curve, or None for a run without rewards."""
    shown = loop.exam.evaluator is not None or not isinstance(site.job.recipe, RowRecipe)
    return site.directory.picture if shown else None


def _candidates(loop: Loop, site: Site, measure: str) -> Candidates[Any]:
    """Return the models to choose from: the original, the last step, and the checkpoint `best` if it is another one.
    `measure` names the field of `Measurement` to compare: `rewards` or `rows`."""
    progress, path = loop.progress, site.directory.path
    before, after, best = (
        None if found is None else getattr(found, measure) for found in (progress.before, progress.after, progress.best)
    )
    latest, at_best = pointed(path, "latest"), pointed(path, "best")
    assert latest is not None, "the last step is always saved"
    earlier = None
    if best is not None and at_best is not None and at_best != latest:
        earlier = Checkpoint(step=step_of(at_best), folder=at_best, result=best)
    return Candidates(
        original=site.job.config.model.model_path,
        before=before,
        last=Checkpoint(step=step_of(latest), folder=latest, result=after),
        best=earlier,
        num_earlier=max(1, progress.num_evaluated - (after is not None)),
    )


def _best_model(progress: Progress, directory: RunDirectory, original: Path, last: Path) -> Path:
    """Return the model that evaluated best: the checkpoint `best`, else the original if checkpoints were compared with
    it, else the last step."""
    compared = progress.before is not None and progress.after is not None
    return pointed(directory.path, "best") or (original if compared else last)
