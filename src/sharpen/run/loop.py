"""The coordinator: runs the steps one after the other in the caller's thread, for rollouts and for rows.

    source.gather ─► source.train ───────────────────────────► journal, monitor, display ─► checkpoints, exam
    rollouts, rows   certificate, parity, update, new weights   the step is recorded          now and then

    of rollouts   explorer.gather ─► journal ─► draw_batches ─► trainer.train_step ─► explorer.settle
    (run.rollouts)  groups           run.db     experiences     update                 engine: weights
    of rows       order.draw ─► tutor.lesson ─► weighted ─► trainer.train_step
    (run.rows)      rows          sequences      batches      update

The trainer starts when the last rollout of the step's batch has ended and its group is on disk. By default all rollouts
of a step run at one policy version, those of the next step start when the engine serves the new weights, and no
experience is stale except for the groups of earlier steps that replay trains again. With other settings of `sync` the
explorer starts batches ahead, as far as `sync.schedule` allows.

In: the parts. Out: trained weights in checkpoints, and `Progress`: everything that a resumed run needs to know.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sharpen.config.run import RunConfig
from sharpen.interrupts import deferred_interrupt
from sharpen.learning.experience.journal import Journal
from sharpen.placement.place import Serving
from sharpen.placement.trainers import AnyTrainer
from sharpen.run.evaluation import Exam, Transcripts
from sharpen.run.progress import Measurement, Progress
from sharpen.run.repeats import Repeats
from sharpen.run.source import Source, StepOutcome
from sharpen.run.steps import Checkpoints, StepPosition, TimeLimit
from sharpen.show.monitor import spent
from sharpen.show.monitor.display import Display, StepReport
from sharpen.show.monitor.metrics import Monitor


@dataclass(slots=True, kw_only=True)
class Loop:
    """The parts of a run, built by `run.assembly`. `serving` is None if the run has no engine."""

    config: RunConfig
    source: Source[Any]
    trainer: AnyTrainer
    serving: Serving | None
    exam: Exam
    journal: Journal
    transcripts: Transcripts
    monitor: Monitor
    display: Display
    run_dir: Path
    total_steps: int
    progress: Progress
    run_seconds: Callable[[], float]
    repeats: Repeats | None = None
    times: dict[str, float] = field(default_factory=dict)
    checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        keep, say = self.config.trainer.keep_checkpoints, self.display.message
        self.checkpoints = Checkpoints(self.trainer, self.journal, self.run_dir, keep=keep, say=say)

    def run(self) -> None:
        """Train until the steps are done or the time is up, then evaluate.

        If anything ends it earlier, the last whole step is saved: see `Checkpoints.saved_on_failure`.
        """
        limit = TimeLimit(self.config.time_limit_s, self.display.message)
        with (
            contextlib.closing(self.source),
            contextlib.nullcontext() if self.repeats is None else contextlib.closing(self.repeats),
            self.checkpoints.saved_on_failure(self._position),
        ):
            evaluation_s = self._evaluate_before()
            if self.repeats is not None:
                self.repeats.evaluation_s = evaluation_s
            more = self.progress.step < self.total_steps
            while more:
                self.run_step(evaluation_s)
                self._save_and_evaluate()
                more = self.progress.step < self.total_steps and not limit.is_up(self.progress.step)
            self.source.close()
            if shares := spent.shares([self.times]):
                self.display.message(f"time of all steps: {spent.line(shares)}")
            self._finish()
            if self.repeats is not None:
                self.display.doing("waiting for the step that is made once more")
                self.repeats.finish()

    def step(self) -> StepOutcome:
        """Gather a batch and train on it, without recording the step."""
        outcome = self.source.train(self.source.gather(self.progress), self.progress)
        if outcome.failure is not None:
            raise outcome.failure
        return outcome

    def run_step(self, evaluation_s: float = 0.0) -> None:
        """Gather a batch, train on it and record the step. `evaluation_s` is what an evaluation before took, which is
        no part of the time until the first step."""
        if self.repeats is not None:
            self.repeats.before(self.progress.step + 1)
        began = time.perf_counter()
        gathered = self.source.gather(self.progress)
        with deferred_interrupt():  # a step counts only if it is trained and recorded
            outcome = self.source.train(gathered, self.progress)
            seconds = time.perf_counter() - began
            self._record(outcome, seconds, evaluation_s)
        if outcome.failure is not None:
            raise outcome.failure
        if self.repeats is not None:
            tokens = outcome.metrics.get("trainer/sequence_tokens", 0.0)
            self.repeats.after(self.progress.step, tokens=tokens, seconds=seconds)

    def _record(self, outcome: StepOutcome, seconds: float, evaluation_s: float) -> None:
        """Record the step in monitor and journal. Last of all set `progress`: from then on the step counts."""
        before, per_s = self.progress, outcome.tokens / seconds
        first = before.seconds_to_first_step
        progress = replace(
            before,
            step=before.step + 1,
            version=self.trainer.version,
            seconds_to_first_step=self.run_seconds() - evaluation_s if first is None else first,
            after=None,  # a finished run that continues is evaluated again
            **{name: getattr(before, name) + count for name, count in outcome.counts.items()},
            **outcome.position,
        )
        metrics = {**outcome.metrics, "time/step_s": seconds, "tokens/per_s": per_s}
        self.monitor.log(progress.step, metrics)
        self.monitor.sample(progress.step, outcome.sample)
        self.monitor.rollouts(progress.step, outcome.rollouts)
        if outcome.taught:
            self.journal.add_taught(progress.step, outcome.taught)
        self.journal.add_step(
            progress.step, progress.version, metrics, outcome.trained, outcome.delivered, outcome.entropies
        )
        self.progress = progress
        self.times = spent.plus(self.times, metrics)
        self.display.step(
            StepReport(
                step=progress.step,
                reward=outcome.reward,
                loss=outcome.loss,
                tokens_per_s=per_s,
                seconds=seconds,
                flat=outcome.flat,
                certified=not any(check.broken for check in outcome.checks),
                spent=spent.shares([metrics]),
                note="; ".join(filter(None, outcome.notes)),
                metrics=outcome.shown,
            )
        )

    def _evaluate_before(self) -> float:
        """Evaluate the original model, unless an earlier session did, and return the seconds this took."""
        if self.progress.before is not None or not self._evaluates_before_and_after:
            return 0.0
        began = time.perf_counter()
        self.progress = replace(self.progress, before=self._evaluate("before", with_further=True))
        return time.perf_counter() - began

    def _save_and_evaluate(self) -> None:
        step, algorithm = self.progress.step, self.config.algorithm
        if step >= self.total_steps:
            return
        if step % algorithm.eval_interval_steps == 0 and self.exam.exists:
            self._save(self._evaluate(f"step {step}", with_further=False))
        elif step % algorithm.save_interval_steps == 0:
            self._save()

    def _finish(self) -> None:
        """Evaluate the final weights and save them, unless an earlier session did."""
        if self.progress.after is None and self._evaluates_before_and_after:
            after = self._evaluate("after", with_further=True)
            self.progress = replace(self.progress, after=after)
            self._save(after)
        else:
            self._save()

    @property
    def _evaluates_before_and_after(self) -> bool:
        return self.exam.exists and self.config.evaluation.before_and_after

    def _evaluate(self, name: str, *, with_further: bool) -> Measurement:
        progress = self.progress
        found = self.exam.take(name, step=progress.step, version=self.trainer.version, with_further=with_further)
        if found.rewards is not None:
            before = None if progress.before is None else progress.before.rewards
            self.display.evaluated(progress.step, found.rewards, before)
        return found

    def _save(self, found: Measurement | None = None) -> None:
        """Write a checkpoint of the last whole step. It becomes `best` if it evaluated better than the original model
        and no worse than the best so far."""
        progress = self.progress
        if found is not None:
            best = found.is_best(progress.best, progress.before, self.config.evaluation.decided_by)
            self.progress = replace(
                progress,
                best=found if best else progress.best,
                best_step=progress.step if best else progress.best_step,
                num_evaluated=progress.num_evaluated + 1,
            )
        self.checkpoints.save(self._position())
        if (keep := self.config.journal.keep_steps) is not None:  # a run that goes on does so from this checkpoint
            self.journal.trim(self.progress.step - keep)
            self.transcripts.trim(self.progress.step - keep)

    def _position(self) -> StepPosition:
        """Return how far the run is, with the tokens of auxiliary models up to now."""
        if self.serving is not None:
            self.progress = replace(self.progress, auxiliary_tokens=self.serving.auxiliary.total_tokens)
        progress = self.progress
        return StepPosition(
            step=progress.step, version=progress.version, best_step=progress.best_step, position=progress.to_json()
        )
