"""The coordinator of a run without rollouts: one step after the other.

    order.draw ─► tutor.lesson ─► weighted ─► check_step ─► trainer.train_step ─► monitor, display
    rows          token sequences   batches     certificate   update

In: the parts. Out: trained weights in checkpoints, and `Progress`, everything that a resumed run needs to know. Where a
workflow is given, the agent is evaluated before and after as in reinforcement learning; the engine gets the weights for
that alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sharpen.algorithm.supervised import SupervisedAlgorithm
from sharpen.certificate.checks import broken_sentences
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.evaluate import Evaluator, evaluation_from_json, evaluation_to_json
from sharpen.execution.start import Served
from sharpen.execution.trainers import AnyTrainer
from sharpen.experience.journal import Journal
from sharpen.monitor.display import Display, StepReport
from sharpen.monitor.metrics import Monitor
from sharpen.monitor.statistics import Evaluation, accuracy_metrics
from sharpen.monitor.verdict import RowLosses, is_best, is_least
from sharpen.steps import Checkpoints, Recorded, TimeLimit, deferred_interrupt
from sharpen.supervised.batches import split, weighted
from sharpen.supervised.checks import check_step
from sharpen.supervised.held_out import HeldOut
from sharpen.supervised.lessons import Lesson, Tutor
from sharpen.supervised.taught import HELD_OUT, held_out_row, taught_row
from sharpen.tasks.order import Order, distinct
from sharpen.trainer.measured import StepMetrics
from sharpen.trainer.work import Minibatch
from sharpen.types import Check, Experience, Task

KIND = "supervised"
EVALUATIONS = ("before", "after", "found_at_best")


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run is. Saved in every checkpoint; counts are over all its sessions. `version` is the policy that
    `step` led to; `found_at_best` and `rows_at_best` are what was found of the checkpoint of `best_step` (None: none
    was better than the start), `num_evaluated` counts the evaluations of checkpoints. `rows_*` have each held-out row's
    losses (`HeldOutLoss.by_row`)."""

    step: int = 0
    version: int = 0
    rows: int = 0
    rows_too_long: int = 0
    trained_tokens: int = 0
    computed_tokens: int = 0
    seconds_to_first_step: float | None = None
    best_step: int | None = None
    num_evaluated: int = 0
    found_at_best: Evaluation | None = None
    rows_at_best: RowLosses | None = None
    rows_before: RowLosses | None = None
    rows_after: RowLosses | None = None
    before: Evaluation | None = None
    after: Evaluation | None = None
    loss_before: Mapping[str, float] | None = None
    loss_after: Mapping[str, float] | None = None
    order: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        content = {name: getattr(self, name) for name in self.__slots__}
        for name in EVALUATIONS:
            content[name] = None if content[name] is None else evaluation_to_json(content[name])
        return {"kind": KIND, **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Progress:
        """The way back, also from earlier checkpoints, which noted other things of their best one. Raises `ConfigError`
        for the position of a run with rollouts."""
        if content.get("kind") != KIND:
            raise ConfigError("the run of this name learns from rollouts: choose another experiment_name")
        fields = {name: value for name, value in content.items() if name in cls.__slots__}
        for name in EVALUATIONS:
            fields[name] = None if fields.get(name) is None else evaluation_from_json(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an evaluation found: rewards of the agent; the loss on held-out rows in numbers, and row by row."""

    rewards: Evaluation | None
    numbers: Mapping[str, float] | None
    rows: RowLosses | None

    @property
    def empty(self) -> bool:
        """Whether there was nothing to evaluate."""
        return self.rewards is None and self.rows is None


@dataclass(slots=True, kw_only=True)
class SupervisedLoop:
    """Everything such a run consists of. `serving` and `evaluator` are None without a workflow, `held_out` without
    held-out rows."""

    config: RunConfig
    algorithm: SupervisedAlgorithm
    tutor: Tutor
    trainer: AnyTrainer
    rows: Sequence[Task]
    order: Order
    journal: Journal
    monitor: Monitor
    display: Display
    serving: Served | None
    evaluator: Evaluator | None
    held_out: HeldOut | None
    run_dir: Path
    total_steps: int
    progress: Progress
    process_seconds: Callable[[], float]
    checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        keep, say = self.config.trainer.keep_checkpoints, self.display.message
        self.checkpoints = Checkpoints(self.trainer, self.journal, self.run_dir, keep=keep, say=say)

    def run(self) -> None:
        """Train until the steps are done or the time is up, then evaluate.

        Whatever ends it before that, a checkpoint has the last whole step; see `Checkpoints.saved_on_failure`.
        """
        limit = TimeLimit(self.config.time_limit_s, self.display.message)
        if self.held_out is not None:
            self.journal.add_taught(HELD_OUT, map(held_out_row, self.held_out.rows))
        with self.checkpoints.saved_on_failure(self._recorded):
            evaluation_s = self._evaluate_before()
            more = self.progress.step < self.total_steps
            while more:
                self._one_step(evaluation_s)
                self._save_and_evaluate()
                more = self.progress.step < self.total_steps and not limit.is_up(self.progress.step)
            self._finish()

    def _one_step(self, evaluation_s: float) -> None:
        began = time.perf_counter()
        rows = [self.rows[place] for place in self.order.draw()]
        lessons = self._lessons(rows)
        updates = [weighted(part, self.algorithm) for part in split(lessons, self.config.trainer.num_minibatches)]
        updates = [update for update in updates if update]
        if not updates:
            raise DatasetError(
                f"none of the {len(rows)} rows of step {self.progress.step + 1} can be trained: "
                f"{sum(lesson.too_long for lesson in lessons)} are longer than model.max_model_len "
                f"({self.tutor.max_model_len}), the others have no token to learn"
            )
        checks = self._certify(lessons, updates)
        taught = [taught_row(row, lesson) for row, lesson in zip(rows, lessons, strict=True)]
        with deferred_interrupt():  # the step is trained and recorded, or what it changed does not count
            trained = self.trainer.train_step([Minibatch(experiences=update) for update in updates])
            self.journal.add_taught(self.progress.step + 1, taught)
            self._record(lessons, trained, checks, time.perf_counter() - began, evaluation_s)

    def _lessons(self, rows: Sequence[Task]) -> list[Lesson]:
        """The rows' lessons; a row that comes again, in a batch larger than the dataset, has an id of its own."""
        return [self.tutor.lesson(row, id_) for row, id_ in zip(rows, distinct([r.id for r in rows]), strict=True)]

    def _certify(self, lessons: Sequence[Lesson], updates: Sequence[Sequence[Experience]]) -> tuple[Check, ...]:
        checks = check_step(lessons, updates, self.tutor)
        self.journal.add_checks(self.progress.step + 1, checks)
        for line in broken_sentences(checks, stop=self.config.certificate.on_violation == "stop"):
            self.display.message(f"  ! certificate: {line}")
        return checks

    def _record(
        self,
        lessons: Sequence[Lesson],
        trained: StepMetrics,
        checks: Sequence[Check],
        seconds: float,
        evaluation_s: float,
    ) -> None:
        """Write down that the step has trained. It counts once `progress` tells of it, which is the last to happen."""
        before = self.progress
        too_long = sum(lesson.too_long for lesson in lessons)
        kept = sum(bool(lesson.experiences) for lesson in lessons)
        first = before.seconds_to_first_step
        progress = replace(
            before,
            step=before.step + 1,
            version=self.trainer.version,
            rows=before.rows + kept,
            rows_too_long=before.rows_too_long + too_long,
            trained_tokens=before.trained_tokens + trained.trained_tokens,
            computed_tokens=before.computed_tokens + trained.computed_tokens,
            seconds_to_first_step=self.process_seconds() - evaluation_s if first is None else first,
            after=None,  # a finished run that goes on is evaluated anew
            loss_after=None,
            rows_after=None,
            order=self.order.state(),
        )
        metrics = {
            **{f"trainer/{name}": float(value) for name, value in trained.as_dict().items()},
            "batch/rows": float(kept),
            "batch/rows_too_long": float(too_long),
            "batch/rows_empty": float(len(lessons) - kept - too_long),
            **{f"certificate/{check.name}_broken": float(check.broken) for check in checks},
            "time/step_s": seconds,
            "time/train_s": trained.seconds,
            "tokens/per_s": trained.sequence_tokens / seconds,
        }
        self.monitor.log(progress.step, metrics)
        self.journal.add_step(progress.step, progress.version, metrics)
        self.progress = progress
        self.display.step(
            StepReport(
                step=progress.step,
                reward=None,
                loss=trained.values["loss"],
                tokens_per_s=metrics["tokens/per_s"],
                seconds=seconds,
                certified=not any(check.broken for check in checks),
                note=_note(len(lessons), too_long, len(lessons) - kept - too_long, self.tutor.max_model_len),
            )
        )

    def _evaluate_before(self) -> float:
        """Evaluate the model as it came, unless an earlier session did; seconds it took."""
        progress = self.progress
        known = progress.before is not None or progress.loss_before is not None
        if known or not self.config.evaluation.before_and_after:
            return 0.0
        began = time.perf_counter()
        found = self._evaluate("before", with_further=True)
        progress.before, progress.loss_before, progress.rows_before = found.rewards, found.numbers, found.rows
        return time.perf_counter() - began

    def _evaluate(self, name: str, *, with_further: bool) -> Found:
        """Rewards of the agent, and the loss on held-out rows, as far as there is something to evaluate."""
        rewards, numbers, rows = None, None, None
        if self.held_out is not None:
            measured = self.held_out.measure()
            numbers, rows = measured.numbers(), measured.by_row
            self.monitor.log(self.progress.step, {f"eval/{key}": value for key, value in numbers.items()})
            self.display.message(f"evaluated {name}: held-out loss {numbers['loss']:.4f} on {numbers['rows']:g} rows")
        if self.evaluator is not None and self.serving is not None:
            self.serving.publish(self.trainer.version, self.trainer.state_tensors())
            rewards = self.evaluator.evaluate(self.trainer.version, name=name, with_further=with_further)
            self.monitor.log(self.progress.step, accuracy_metrics(rewards))
        return Found(rewards=rewards, numbers=numbers, rows=rows)

    def _save_and_evaluate(self) -> None:
        step, algorithm = self.progress.step, self.config.algorithm
        if step >= self.total_steps:
            return
        if step % algorithm.eval_interval_steps == 0:
            self._save(self._evaluate(f"step {step}", with_further=False))
        elif step % algorithm.save_interval_steps == 0:
            self._save()

    def _finish(self) -> None:
        """Evaluate the final weights and save them, unless an earlier session did."""
        progress, found = self.progress, None
        known = progress.after is not None or progress.loss_after is not None
        if not known and self.config.evaluation.before_and_after:
            found = self._evaluate("after", with_further=True)
            progress.after, progress.loss_after, progress.rows_after = found.rewards, found.numbers, found.rows
        self._save(found)

    def _save(self, found: Found | None = None) -> None:
        """Write a checkpoint of the last whole step; it becomes `best` if it is better than the start and no worse than
        the best so far."""
        progress = self.progress
        if found is not None and not found.empty:
            progress = replace(progress, num_evaluated=progress.num_evaluated + 1)
            if self._is_best(found):
                progress = replace(
                    progress, best_step=progress.step, found_at_best=found.rewards, rows_at_best=found.rows
                )
            self.progress = progress
        self.checkpoints.save(self._recorded())

    def _recorded(self) -> Recorded:
        progress = self.progress
        return Recorded(
            step=progress.step, version=progress.version, best_step=progress.best_step, position=progress.to_json()
        )

    def _is_best(self, found: Found) -> bool:
        """By the agent's rewards, else by the held-out loss."""
        progress = self.progress
        if found.rewards is not None:
            return is_best(found.rewards, progress.found_at_best, progress.before, self.config.evaluation.decided_by)
        assert found.rows is not None
        return is_least(found.rows, progress.rows_at_best, progress.rows_before)


def _note(num_rows: int, too_long: int, empty: int, max_model_len: int) -> str:
    """What was left out of a step, if anything."""
    said = [f"{too_long} of {num_rows} rows left out: longer than {max_model_len} tokens"] if too_long else []
    return "; ".join(said + ([f"{empty} of {num_rows} rows have no token to learn"] if empty else []))
