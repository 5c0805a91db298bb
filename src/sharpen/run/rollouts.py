"""The source of a run that learns from rollouts: the explorer's groups, made into batches and trained.

In: how far the run is. Out: a `StepOutcome`. A group is on disk before it trains, and the certificate's checks that
need no forward pass run before the update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np

from sharpen.agent.rollout.refill import StepRollouts, num_sampled_tokens
from sharpen.agent.rollout.statistics import USER_PREFIXES, check_excluded, summarize
from sharpen.agent.transcript import best_and_worst, rows_of
from sharpen.config.run import RunConfig
from sharpen.evidence.certificate.audit import audit
from sharpen.evidence.certificate.delivery import delivery
from sharpen.evidence.certificate.draws import Draws, sums_of
from sharpen.evidence.certificate.role_baselines import RoleBaselines
from sharpen.evidence.certificate.rules import Rules
from sharpen.evidence.diagnose.diagnosis import Watch
from sharpen.learning.experience.draw import Batch, draw_batches, roles_after
from sharpen.learning.experience.entropies import entropy_sums
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.records import Delivery, TaughtRow
from sharpen.learning.experience.replay import Replay, ReplayGroup, mixed, probe
from sharpen.learning.experience.reread import Rereading
from sharpen.learning.experience.told import Told
from sharpen.learning.recipe import RolloutRecipe
from sharpen.learning.schedule import Schedule
from sharpen.learning.trainer.measured import StepMetrics
from sharpen.placement.place import Serving
from sharpen.placement.teacher_endpoint import TeacherEndpoint
from sharpen.placement.trainers import AnyTrainer
from sharpen.run.expert import ExpertRows
from sharpen.run.progress import Progress
from sharpen.run.source import StepOutcome, record_checks
from sharpen.show.monitor.display import Display
from sharpen.types import CallStatus, Check, Experience, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step that is about to train, at policy `version`: its own rollouts, the replayed groups, both together as
    `groups` and as `batches`, the record of what the trainer receives, the checks and records of the expert rows, and
    the baselines of roles after it."""

    number: int
    version: int
    rolled_out: StepRollouts
    replayed: Sequence[ReplayGroup]
    groups: tuple[Group, ...]
    batches: tuple[Batch, ...]
    delivered: Delivery
    expert_checks: tuple[Check, ...]
    taught: tuple[TaughtRow, ...]
    teaching: Mapping[str, float]
    teaching_note: str
    roles: Mapping[str, float]

    @property
    def fresh(self) -> tuple[Group, ...]:
        return self.rolled_out.groups

    @property
    def training(self) -> list[Batch]:
        return [batch for batch in self.batches if batch.experiences or batch.experts]


class Supply(Protocol):
    """Where a step's rollouts come from: `run.explorer` in this process, or through `run.receiver` from another one."""

    def gather(self, trainer: AnyTrainer) -> StepRollouts:
        """Return the groups of the next step."""

    def settle(self, trainer: AnyTrainer) -> None:
        """The step has trained: move the weights, if they are due."""

    def serve_latest(self, trainer: AnyTrainer) -> None:
        """Make the engine, if there is one here, serve the trainer's weights."""

    def probe(self) -> tuple[Experience, ...]:
        """Return calls of the engine since the last sync, to compare the trainer with."""

    def position(self) -> tuple[dict[str, Any], list[list[int]]]:
        """Return what a resumed run needs: the order's state, and the tasks of each unfinished batch."""

    def take_times(self) -> dict[str, float]:
        """Return the seconds of the step by name: rollout, generate, wait, drain, idle, sync."""

    @property
    def num_ahead(self) -> int:
        """How many batches are begun, or ready, beyond the present one."""

    def close(self) -> None:
        """Cancel what is in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSource:
    """Satisfies `run.source.Source`."""

    recipe: RolloutRecipe
    serving: Serving | None
    trainer: AnyTrainer
    supply: Supply
    journal: Journal
    display: Display
    watch: Watch
    expert: ExpertRows | None = None
    replay: Replay | None = None
    told: Told | None = None
    teacher: TeacherEndpoint | None = None
    rereading: Rereading | None = None
    draws: Draws = field(default_factory=Draws)
    baselines: RoleBaselines = field(default_factory=RoleBaselines)

    def gather(self, progress: Progress) -> StepRollouts:
        """Return the groups of the next batch, whose rollouts may have been started ahead. If not, what an evaluation
        left in the engine's cache goes first."""
        if self.serving is not None and not self.recipe.overlaps:
            self.serving.rest()
        return self.supply.gather(self.trainer)

    def train(self, gathered: StepRollouts, progress: Progress) -> StepOutcome:
        """Train on the groups and sync the weights if they are due. Raises as `Trainer.train_step`, and
        `CertificateError`."""
        began = time.perf_counter()
        self.display.doing("training")
        step = self._draw(gathered, progress)
        checks = self._certify(step)
        if self.serving is not None and not self.recipe.overlaps:
            self.serving.rest()
        compared = self.supply.probe() or (probe(step.fresh, step.version) if step.replayed else ())
        trained = self.trainer.train_step(step.training, step=step.number, probe=compared) if step.training else None
        train_s = time.perf_counter() - began
        drawn = self._test_draws(step, trained)
        failure: BaseException | None = None
        try:
            if self.replay is not None:
                self.replay.keep(step.groups, step.batches)
            stop = self.recipe.config.certificate.on_violation == "stop"
            record_checks([drawn], step.number, self.journal, self.display, stop=stop, trained=True)
            self.supply.settle(self.trainer)
        except BaseException as error:  # the step has trained, so it is recorded before this is raised
            failure = error
        self.display.doing("")
        outcome = self._outcome(step, (*checks, drawn), trained, {"train": train_s, **self.supply.take_times()})
        return outcome if failure is None else replace(outcome, failure=failure)

    def serve(self) -> None:
        """Make the engine serve the trainer's weights, after the rollouts in flight where the sync style drains
        them."""
        self.supply.serve_latest(self.trainer)

    def close(self) -> None:
        """Cancel the rollouts in flight."""
        self.supply.close()

    def _draw(self, rolled_out: StepRollouts, progress: Progress) -> _Step:
        """Write the groups to disk, add replayed groups and expert rows, and make the batches of the step."""
        config, algorithm, version = self.recipe.config, self.recipe.algorithm, self.trainer.version
        teaching: Mapping[str, float] = {}
        note = ""
        if self.teacher is not None:
            found = self.teacher.teach(rolled_out.groups)
            rolled_out, teaching = replace(rolled_out, groups=found.groups), found.metrics
        elif self.rereading is not None:
            placed = self.rereading.place(rolled_out.groups)
            rolled_out, teaching = replace(rolled_out, groups=placed.groups), placed.metrics
            note = placed.note
        number = progress.step + 1
        for group in rolled_out.groups:
            self.journal.add(group)
        self.journal.flush()
        check_excluded(rolled_out.groups, config.rollout.max_excluded_share)
        replayed = self.replay.draw(number, version) if self.replay is not None else ()
        groups = mixed(rolled_out.groups, [one.group for one in replayed], algorithm)
        batches = draw_batches(groups, algorithm, config.trainer.num_minibatches, progress.roles)
        if self.told is not None:
            batches = self.told.join(batches, groups)
        if self.rereading is not None:
            batches = self.rereading.join(batches)
        expert_checks: tuple[Check, ...] = ()
        taught: tuple[TaughtRow, ...] = ()
        if self.expert is not None:
            batches, expert_checks, taught = self.expert.join(batches)
        return _Step(
            number=number,
            version=version,
            rolled_out=rolled_out,
            replayed=replayed,
            groups=groups,
            batches=batches,
            delivered=delivery(batches, {one.group.id for one in replayed}),
            expert_checks=expert_checks,
            taught=taught,
            teaching=teaching,
            teaching_note=note,
            roles=roles_after(groups, algorithm, progress.roles),
        )

    def _certify(self, step: _Step) -> tuple[Check, ...]:
        """Run and record the certificate's checks that need no forward pass. Those of expert rows come last."""
        config, rules = self.recipe.config, Rules.of(self.recipe.config)
        found = audit(
            step.fresh,
            step.delivered,
            rules,
            version=step.version,
            max_staleness=self.recipe.schedule.max_staleness,
            replayed=[one.group for one in step.replayed],
            replay_staleness=self.replay.max_staleness if self.replay is not None else 0,
            baselines=self.baselines.before(step.number, step.fresh, rules),
        )
        self.baselines.learn(step.number, step.fresh, step.delivered, rules)
        checks = (*found, *step.expert_checks)
        record_checks(checks, step.number, self.journal, self.display, stop=config.certificate.on_violation == "stop")
        return checks

    def _test_draws(self, step: _Step, trained: StepMetrics | None) -> Check:
        """Test whether the tokens of the step, and of all so far, were drawn from the recorded distributions, of which
        the trainer has measured the entropies."""
        measured = {} if trained is None else entropy_sums(trained.entropies)
        metrics = {} if trained is None else {f"trainer/{name}": value for name, value in trained.as_dict().items()}
        metrics |= {"sync/staleness_max": 0.0} if self.recipe.overlaps else {}
        rules, places = Rules.of(self.recipe.config), step.delivered.places
        found = sums_of(step.fresh, measured, metrics, version=step.version, places=places, rules=rules)
        return self.draws.add(step.number, found)

    def _outcome(
        self, step: _Step, checks: tuple[Check, ...], trained: StepMetrics | None, times: Mapping[str, float]
    ) -> StepOutcome:
        groups, algorithm = step.fresh, self.recipe.algorithm
        statistics, sampled = summarize(groups), sum(num_sampled_tokens(group) for group in groups)
        metrics = {
            **statistics.metrics(),
            **({f"trainer/{name}": value for name, value in trained.as_dict().items()} if trained is not None else {}),
            **_batch_metrics(step.batches),
            **(self.replay.metrics(step.replayed, step.version) if self.replay is not None else {}),
            **(step.rolled_out.metrics() if algorithm.max_refill else {}),
            **{f"certificate/{check.name}_broken": float(check.broken) for check in checks},
            **{f"time/{name}_s": times[name] for name in ("rollout", "generate", "idle", "train", "sync")},
            **(self._async_metrics(step, times) if self.recipe.overlaps else {}),
            "tokens/sampled": float(sampled),
            **step.teaching,
            **{f"baseline/{role or 'all'}": number for role, number in step.roles.items()},
            **self._auxiliary(),
        }
        ages = staleness_settings(self.recipe.config, self.recipe.schedule)
        notes = [
            *statistics.notes(needs_reward=algorithm.needs_reward),
            step.rolled_out.note(),
            *(f"{alarm}: lower {ages}" for alarm in (trained.alarms if trained is not None else ())),
            _expert_note(step.batches),
            step.teaching_note or _untrained_note(groups, trained),
            self.watch.add(step.number, metrics, groups),
        ]
        order, begun = self.supply.position()
        return StepOutcome(
            metrics=metrics,
            tokens=sampled,
            counts={
                "rollouts": sum(len(group.rollouts) for group in groups),
                "sampled_tokens": sampled,
                "trained_tokens": 0 if trained is None else trained.trained_tokens,
                "computed_tokens": 0 if trained is None else trained.computed_tokens,
            },
            position={
                "order": order,
                "drawn": begun,
                "expert": {} if self.expert is None else self.expert.state(),
                "roles": step.roles,
            },
            checks=checks,
            trained=[one for batch in step.batches for one in (*batch.experiences, *batch.experts)],
            delivered=step.delivered,
            taught=step.taught,
            entropies=() if trained is None else trained.entropies,
            reward=None if math.isnan(statistics.reward_mean) else statistics.reward_mean,
            flat=f"{statistics.num_flat_groups}/{statistics.num_groups}",
            notes=notes,
            shown={name: value for name, value in sorted(metrics.items()) if name.startswith(USER_PREFIXES)},
            sample=best_and_worst(groups),
            rollouts=rows_of(groups, self.recipe.config.monitor_rollouts),
        )

    def _auxiliary(self) -> dict[str, float]:
        """Return the tokens that auxiliary models have used so far; nothing where they serve in another process."""
        used = {} if self.serving is None else self.serving.auxiliary.total_tokens
        return {f"auxiliary/{name}/tokens_run": float(count) for name, count in used.items()}

    def _async_metrics(self, step: _Step, times: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of asynchronous runs: the age in policy versions of loss tokens, without replayed groups,
        and the seconds of waiting."""
        fresh = {group.id for group in step.fresh}
        trained = [one for batch in step.batches for one in batch.experiences if one.group_id in fresh]
        ages = [step.version - one.versions_T[one.loss_mask_T] for one in trained]
        ages_E = np.concatenate(ages) if ages else np.zeros(1)
        return {
            **{f"time/{name}_s": times[name] for name in ("wait", "drain")},
            "sync/staleness_mean": float(ages_E.mean()),
            "sync/staleness_max": float(ages_E.max()),
            "sync/staleness_allowed": float(self.recipe.schedule.max_staleness),
            "sync/batches_ahead": float(self.supply.num_ahead),
        }


def _untrained_note(groups: Sequence[Group], trained: StepMetrics | None) -> str:
    """Return the reason why the step trained no token; empty if it trained some."""
    if trained is not None and trained.trained_tokens:
        return ""
    calls = [call for group in groups for rollout in group.scored for call in rollout.calls]
    if calls and all(call.sampling.temperature <= 0 for call in calls):
        return f"no token was trained: all {len(calls)} calls were sampled at temperature 0"
    if calls and all(call.status == CallStatus.LEFT_OUT for call in calls):
        return f"no token was trained: the workflow left all {len(calls)} calls out"
    if not any(call.trainable for call in calls):
        return "no token was trained: no rollout with a reward has a trainable call"
    return "no token was trained: every group was left out"


def _expert_note(batches: Sequence[Batch]) -> str:
    """Return a note about expert rows left out, if any."""
    too_long = sum(batch.num_expert_rows_too_long for batch in batches)
    return f"{too_long} expert rows left out: longer than model.max_model_len" if too_long else ""


def _batch_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Combine the metrics of a step's batches: the sum of counts, the average of means, deviations and extremes."""
    if not batches:
        return {}
    rows, means = [batch.metrics() for batch in batches], ("mean", "std", "min", "max")
    found = {name: [row[name] for row in rows if name in row] for name in dict.fromkeys(chain.from_iterable(rows))}
    return {
        f"batch/{name}": sum(values) / (len(values) if name.endswith(means) else 1) for name, values in found.items()
    }


def staleness_settings(config: RunConfig, schedule: Schedule) -> str:
    """Return the settings in effect, with their values, that make trained weights differ from those that sampled."""
    sync, trainer = config.sync, config.trainer
    ways = [
        ("sync.max_staleness", schedule.max_staleness, schedule.overlaps and sync.style != "fixed"),
        ("sync.interval", sync.interval, sync.interval > 1),
        ("sync.offset", sync.offset, sync.offset > 0),
        ("sampling.replay_share", config.sampling.replay_share, config.sampling.replay_share > 0.0),
        ("trainer.epochs", trainer.epochs, trainer.epochs > 1),
        ("trainer.num_minibatches", trainer.num_minibatches, trainer.num_minibatches > 1),
        ("algorithm.learning_rate", config.algorithm.learning_rate, True),
    ]
    return " or ".join(f"{name} ({value:g})" for name, value, in_force in ways if in_force)
