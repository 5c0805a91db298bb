"""The coordinator: one step after the other, in the caller's thread.

    explorer.gather ─► journal.flush ─► draw_batches ─► trainer.train_step ─► explorer.settle ─► monitor, display
    groups              run.db, on disk   experiences      parity, then update    engine: weights    what people see

Who waits for whom: the trainer starts when the last rollout of the step's batch has ended and its group is on disk.
Unless the settings of `sync` say otherwise, all rollouts of a step run at one policy version, the next step's start
when the engine serves the new weights, and no experience is stale, but for groups of earlier steps that replay (a
setting) trains again beside the fresh ones. Else `explorer` begins batches ahead, as far as `sync.schedule` lets it.

In: the parts. Out: trained weights in checkpoints, and `Progress`: everything that a resumed run needs to know.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.algorithm.presets import Algorithm
from sharpen.certificate.audit import audit
from sharpen.certificate.checks import broken_sentences
from sharpen.certificate.delivery import delivery
from sharpen.certificate.rules import Rules
from sharpen.config.run import RunConfig
from sharpen.diagnose.diagnosis import Watch
from sharpen.evaluate import Evaluator, evaluation_from_json, evaluation_to_json
from sharpen.execution.start import Served
from sharpen.execution.trainers import AnyTrainer
from sharpen.experience.draw import Batch, draw_batches
from sharpen.experience.journal import Journal
from sharpen.experience.records import Delivery
from sharpen.experience.replay import Replay, mixed, probe
from sharpen.explorer import Explorer
from sharpen.monitor import spent
from sharpen.monitor.display import Display, StepReport
from sharpen.monitor.metrics import Monitor
from sharpen.monitor.statistics import Evaluation, accuracy_metrics
from sharpen.monitor.verdict import is_best
from sharpen.rollout.refill import RolledOut, num_sampled_tokens
from sharpen.rollout.statistics import OF_USER, check_excluded, summarize
from sharpen.steps import Checkpoints, Recorded, TimeLimit, deferred_interrupt
from sharpen.supervised.expert import ExpertRows
from sharpen.sync.schedule import what_ages
from sharpen.trainer.measured import StepMetrics
from sharpen.types import Check, Group


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run is. Saved in every checkpoint; counts are over all its sessions. `version` is the policy that
    `step` led to; `best` is what was found of the checkpoint of `best_step` (None: none was better than the start),
    and `num_evaluated` counts the evaluations of checkpoints; `drawn` has the tasks of each batch that was begun and
    has not trained."""

    step: int = 0
    version: int = 0
    rollouts: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    computed_tokens: int = 0
    seconds_to_first_step: float | None = None
    best: Evaluation | None = None
    best_step: int | None = None
    num_evaluated: int = 0
    before: Evaluation | None = None
    after: Evaluation | None = None
    order: Mapping[str, Any] = field(default_factory=dict)
    drawn: Sequence[Sequence[int]] = ()
    expert: Mapping[str, Any] = field(default_factory=dict)
    auxiliary_tokens: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        content = {name: getattr(self, name) for name in self.__slots__}
        for name in ("before", "after", "best"):
            content[name] = None if content[name] is None else evaluation_to_json(content[name])
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Progress:
        """The way back, also from earlier checkpoints, which noted other things of their best one."""
        fields = {name: value for name, value in content.items() if name in cls.__slots__}
        for name in ("before", "after", "best"):
            fields[name] = None if fields.get(name) is None else evaluation_from_json(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step as it went: what was rolled out, what was trained, how long each part took (seconds; see
    `Explorer.take_times`). `sync` has the figures of rollouts that run ahead, empty where none do. `failure`: what
    ended the run behind the training, as weights moved; the step is whole."""

    groups: tuple[Group, ...]
    rolled_out: RolledOut
    batches: tuple[Batch, ...]
    trained: StepMetrics | None
    delivered: Delivery
    checks: tuple[Check, ...]
    replay: Mapping[str, float]
    rollout_s: float
    generate_s: float
    idle_s: float
    train_s: float
    sync_s: float
    sync: Mapping[str, float]
    failure: BaseException | None

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the engine sampled, failed attempts included."""
        return sum(num_sampled_tokens(group) for group in self.groups)


@dataclass(slots=True, kw_only=True)
class Loop:
    """Everything a run consists of, put together by `tune`."""

    config: RunConfig
    algorithm: Algorithm
    serving: Served
    trainer: AnyTrainer
    explorer: Explorer
    journal: Journal
    monitor: Monitor
    display: Display
    watch: Watch
    evaluator: Evaluator | None
    run_dir: Path
    total_steps: int
    progress: Progress
    process_seconds: Callable[[], float]
    expert: ExpertRows | None = None
    replay: Replay | None = None
    times: list[dict[str, float]] = field(default_factory=list)
    checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        keep, say = self.config.trainer.keep_checkpoints, self.display.message
        self.checkpoints = Checkpoints(self.trainer, self.journal, self.run_dir, keep=keep, say=say)

    def run(self) -> None:
        """Train until the steps are done or the time is up, then evaluate.

        Whatever ends it before that, a checkpoint has the last whole step; see `Checkpoints.saved_on_failure`.
        """
        limit = TimeLimit(self.config.time_limit_s, self.display.message)
        with contextlib.closing(self.explorer), self.checkpoints.saved_on_failure(self._recorded):
            evaluation_s = self._evaluate_before()
            more = self.progress.step < self.total_steps
            while more:
                self._one_step(evaluation_s)
                self._save_and_evaluate()
                more = self.progress.step < self.total_steps and not limit.is_up(self.progress.step)
            self.explorer.close()
            if self.times:
                self.display.message(f"time of all steps: {spent.line(spent.shares(self.times))}")
            self._finish()

    def step(self) -> StepResult:
        """Roll out one batch of tasks, train on it, and serve the new weights."""
        result = self._train(self.explorer.gather(self.trainer))
        if result.failure is not None:
            raise result.failure
        return result

    def _train(self, rolled_out: RolledOut) -> StepResult:
        began = time.perf_counter()
        self.display.doing("training")
        fresh = rolled_out.groups
        for group in fresh:
            self.journal.add(group)
        self.journal.flush()  # nothing is trained that is not on disk
        check_excluded(fresh, self.config.rollout.max_excluded_share)
        step, version = self.progress.step + 1, self.trainer.version
        kept = self.replay.draw(step, version) if self.replay is not None else ()
        replayed = [one.group for one in kept]
        groups = mixed(fresh, replayed, self.algorithm)
        batches = draw_batches(groups, self.algorithm, self.config.trainer.num_minibatches)
        of_expert: tuple[Check, ...] = ()
        if self.expert is not None:
            batches, of_expert = self.expert.join(batches)
        delivered = delivery(batches, {group.id for group in replayed})
        checks = self._certify(fresh, delivered, of_expert, replayed)
        training = [batch for batch in batches if batch.experiences or batch.experts]
        compared = self.explorer.probe() or (probe(fresh, version) if replayed else ())
        trained = self.trainer.train_step(training, step=step, probe=compared) if training else None
        trained_at = time.perf_counter()
        failure: BaseException | None = None
        try:
            if self.replay is not None:
                self.replay.keep(groups, batches)
            self.explorer.settle(self.trainer)
        except BaseException as error:  # the step has trained: it is recorded whatever ends the run behind it
            failure = error
        self.display.doing("")
        times = self.explorer.take_times()
        return StepResult(
            groups=fresh,
            rolled_out=rolled_out,
            batches=batches,
            trained=trained,
            delivered=delivered,
            checks=checks,
            replay=self.replay.metrics(kept, version) if self.replay is not None else {},
            rollout_s=times.pop("rollout"),
            generate_s=times.pop("generate"),
            idle_s=times.pop("idle"),
            train_s=trained_at - began,
            sync_s=times.pop("sync"),
            sync=self._ahead(fresh, batches, version, times) if self.explorer.schedule.overlaps else {},
            failure=failure,
        )

    def _ahead(
        self, groups: Sequence[Group], batches: Sequence[Batch], version: int, times: Mapping[str, float]
    ) -> dict[str, float]:
        """What running ahead meant in a step that began at policy `version`: ages of its loss tokens (of the groups
        that train for the first time), and waiting."""
        fresh = {group.id for group in groups}
        trained = [one for batch in batches for one in batch.experiences if one.group_id in fresh]
        ages = [version - one.versions_T[one.loss_mask_T] for one in trained]
        ages_E = np.concatenate(ages) if ages else np.zeros(1)
        return {
            **{f"time/{name}_s": seconds for name, seconds in times.items()},
            "sync/staleness_mean": float(ages_E.mean()),
            "sync/staleness_max": float(ages_E.max()),
            "sync/staleness_allowed": float(self.explorer.schedule.max_staleness),
            "sync/batches_ahead": float(self.explorer.num_ahead),
        }

    def _certify(
        self,
        groups: Sequence[Group],
        delivered: Delivery,
        of_expert: tuple[Check, ...],
        replayed: Sequence[Group],
    ) -> tuple[Check, ...]:
        """The checks of the certificate that need no forward pass, those of an expert's rows behind the others. Raises
        `CertificateError`, or warns."""
        checks = audit(
            groups,
            delivered,
            Rules.of(self.config),
            version=self.trainer.version,
            max_staleness=self.explorer.schedule.max_staleness,
            replayed=replayed,
            replay_staleness=self.replay.max_staleness if self.replay is not None else 0,
        )
        checks = (*checks, *of_expert)
        self.journal.add_checks(self.progress.step + 1, checks)
        for line in broken_sentences(checks, stop=self.config.certificate.on_violation == "stop"):
            self.display.message(f"  ! certificate: {line}")
        return checks

    def _one_step(self, evaluation_s: float) -> None:
        began = time.perf_counter()
        rolled_out = self.explorer.gather(self.trainer)
        with deferred_interrupt():  # the step is trained and recorded, or what it changed does not count
            result = self._train(rolled_out)
            self._record(result, time.perf_counter() - began, evaluation_s)
        if result.failure is not None:
            raise result.failure

    def _progressed(self, result: StepResult, evaluation_s: float) -> Progress:
        """How far the run is with this step."""
        before, trained = self.progress, result.trained
        order, drawn = self.explorer.position()
        first = before.seconds_to_first_step
        return replace(
            before,
            step=before.step + 1,
            version=self.trainer.version,
            rollouts=before.rollouts + sum(len(group.rollouts) for group in result.groups),
            sampled_tokens=before.sampled_tokens + result.sampled_tokens,
            trained_tokens=before.trained_tokens + (0 if trained is None else trained.trained_tokens),
            computed_tokens=before.computed_tokens + (0 if trained is None else trained.computed_tokens),
            seconds_to_first_step=self.process_seconds() - evaluation_s if first is None else first,
            after=None,  # a finished run that goes on is evaluated anew
            order=order,
            drawn=drawn,
            expert={} if self.expert is None else self.expert.state(),
        )

    def _record(self, result: StepResult, seconds: float, evaluation_s: float) -> None:
        """Write down that the step has trained. It counts once `progress` tells of it, which is the last to happen."""
        progress, statistics = self._progressed(result, evaluation_s), summarize(result.groups)
        tokens_per_s = result.sampled_tokens / seconds
        alarms = result.trained.alarms if result.trained is not None else ()
        metrics = {
            **statistics.metrics(),
            **_trainer_metrics(result.trained),
            **_batch_metrics(result.batches),
            **result.replay,
            **(result.rolled_out.metrics() if self.algorithm.max_refill else {}),
            **{f"certificate/{check.name}_broken": float(check.broken) for check in result.checks},
            "time/step_s": seconds,
            "time/rollout_s": result.rollout_s,
            "time/generate_s": result.generate_s,
            "time/idle_s": result.idle_s,
            "time/train_s": result.train_s,
            "time/sync_s": result.sync_s,
            **result.sync,
            "tokens/sampled": float(result.sampled_tokens),
            "tokens/per_s": tokens_per_s,
            **{f"auxiliary/{name}/tokens_run": float(n) for name, n in self.serving.auxiliary.total_tokens.items()},
        }
        notes = [
            *statistics.notes(needs_reward=self.algorithm.needs_reward),
            result.rolled_out.note(),
            *(f"{alarm}: lower {what_ages(self.config, self.explorer.schedule)}" for alarm in alarms),
            _expert_note(result.batches),
            _untrained_note(result),
            self.watch.add(progress.step, metrics, result.groups),
        ]
        self.monitor.log(progress.step, metrics)
        trained = [one for batch in result.batches for one in (*batch.experiences, *batch.experts)]
        self.journal.add_step(progress.step, progress.version, metrics, trained, result.delivered)
        self.progress = progress
        self.times.append({name: value for name, value in metrics.items() if name.startswith("time/")})
        report = StepReport(
            step=progress.step,
            reward=None if math.isnan(statistics.reward_mean) else statistics.reward_mean,
            tokens_per_s=tokens_per_s,
            seconds=seconds,
            flat=f"{statistics.num_flat_groups}/{statistics.num_groups}",
            certified=not any(check.broken for check in result.checks),
            spent=spent.shares([metrics]),
            note="; ".join(filter(None, notes)),
            metrics={name: value for name, value in sorted(metrics.items()) if name.startswith(OF_USER)},
        )
        self.display.step(report)

    def _evaluate_before(self) -> float:
        """Evaluate the model as it came, unless an earlier session did; seconds it took."""
        if self.evaluator is None or self.progress.before is not None or not self.config.evaluation.before_and_after:
            return 0.0
        began = time.perf_counter()
        before = self.evaluator.evaluate(self.trainer.version, name="before", with_further=True)
        self.progress.before = before
        self.monitor.log(self.progress.step, accuracy_metrics(before))
        return time.perf_counter() - began

    def _save_and_evaluate(self) -> None:
        step, algorithm = self.progress.step, self.config.algorithm
        last = step >= self.total_steps
        if step % algorithm.eval_interval_steps == 0 and not last and self.evaluator is not None:
            self.explorer.serve_latest(self.trainer)
            found = self.evaluator.evaluate(self.trainer.version, name=f"step {step}", with_further=False)
            self.monitor.log(step, accuracy_metrics(found))
            self._save(found)
        elif step % algorithm.save_interval_steps == 0 and not last:
            self._save()

    def _finish(self) -> None:
        """Evaluate the final weights and save them, unless an earlier session did."""
        if self.progress.after is None and self.evaluator is not None and self.config.evaluation.before_and_after:
            self.explorer.serve_latest(self.trainer)
            self.progress.after = self.evaluator.evaluate(self.trainer.version, name="after", with_further=True)
            self.monitor.log(self.progress.step, accuracy_metrics(self.progress.after))
            self._save(self.progress.after)
        else:
            self._save()

    def _save(self, found: Evaluation | None = None) -> None:
        """Write a checkpoint of the last whole step; it becomes `best` if it is better than the start and no worse than
        the best so far."""
        progress = self.progress
        if found is not None:
            best = is_best(found, progress.best, progress.before, self.config.evaluation.decided_by)
            self.progress = replace(
                progress,
                best=found if best else progress.best,
                best_step=progress.step if best else progress.best_step,
                num_evaluated=progress.num_evaluated + 1,
            )
        self.checkpoints.save(self._recorded())

    def _recorded(self) -> Recorded:
        """How far the run is, with what auxiliary models were used for until now."""
        self.progress.auxiliary_tokens = self.serving.auxiliary.total_tokens
        progress = self.progress
        return Recorded(
            step=progress.step, version=progress.version, best_step=progress.best_step, position=progress.to_json()
        )


def _untrained_note(result: StepResult) -> str:
    """Why the step trained no token, if it did not."""
    if result.trained is not None and result.trained.trained_tokens:
        return ""
    calls = [call for group in result.groups for rollout in group.scored for call in rollout.calls]
    if calls and all(call.sampling.temperature <= 0 for call in calls):
        return f"no token was trained: all {len(calls)} calls were sampled at temperature 0"
    if not any(call.trainable for call in calls):
        return "no token was trained: no rollout with a reward has a call that can be"
    return "no token was trained: every group was left out"


def _expert_note(batches: Sequence[Batch]) -> str:
    """What was left out of an expert's rows, if anything."""
    too_long = sum(batch.num_expert_rows_too_long for batch in batches)
    return f"{too_long} of the expert's rows left out: longer than model.max_model_len" if too_long else ""


def _trainer_metrics(trained: StepMetrics | None) -> dict[str, float]:
    return {f"trainer/{name}": value for name, value in trained.as_dict().items()} if trained is not None else {}


def _batch_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Counts of a step's batches: summed, but for the means."""
    if not batches:
        return {}
    rows, means = [batch.metrics() for batch in batches], ("mean", "std", "min", "max")
    found = {name: [row[name] for row in rows if name in row] for name in dict.fromkeys(chain.from_iterable(rows))}
    return {
        f"batch/{name}": sum(values) / (len(values) if name.endswith(means) else 1) for name, values in found.items()
    }
