"""All rules in order of precedence, the reader of a run's records, and the diagnosis during a run.

In: a run directory, or each step as it finishes (`Watch`). Out: `Finding`s, the most likely cause first.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.errors import ConfigError
from sharpen.evidence.diagnose import hacking, policy, rewards, rollouts, rows
from sharpen.evidence.diagnose.data import MAX_GROUPS, Digest, Rewards, RolloutRunData, digest_group, is_scale_free
from sharpen.evidence.diagnose.finding import Finding, ids
from sharpen.evidence.diagnose.rows import RowRunData
from sharpen.evidence.diagnose.series import MAX_EDGE, StepRow
from sharpen.evidence.ended import read_ended
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.experience.records import EVALUATIONS
from sharpen.learning.recipe import RolloutRecipe, RowRecipe, recipe_of
from sharpen.types import Group

RULES: tuple[Callable[[RolloutRunData], Finding | None], ...] = (
    # rollouts that are missing or damaged, and what caused that
    rollouts.excluded,
    rollouts.empty_masks,
    rewards.reward_scale,
    rewards.parts_apart,
    policy.learning_rate_too_high,  # a broken policy also makes malformed calls and endless answers
    rollouts.tool_parse_failures,
    rollouts.truncation,
    policy.kl_blow_up,
    policy.entropy_collapse,
    rollouts.degenerate_text,
    rollouts.length_drift,
    policy.clip_fraction,
    # a reward that rises for the wrong reason
    hacking.second_apart,
    hacking.held_out_apart,
    hacking.speaks_to_judge,
    hacking.phrase_with_reward,
    hacking.length_with_reward,
    hacking.calls_with_reward,
    # no signal, or a signal that is not used
    rewards.all_wrong,
    rewards.all_right,
    rewards.zero_variance,
    policy.learning_rate_too_low,
)
WITHOUT_REWARDS: tuple[Callable[[RolloutRunData], Finding | None], ...] = (
    rollouts.excluded,
    rollouts.empty_masks,
    rollouts.tool_parse_failures,
    policy.kl_blow_up,
    policy.clip_fraction,
)
"""The rules for a run that learns from a teacher instead of rewards. The others read rewards, or report what a teacher
may well cause (less entropy, other lengths)."""
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "all_wrong": ("zero_variance",),
    "degenerate_text": ("phrase_with_reward", "length_with_reward"),
    "all_right": ("zero_variance",),
    "entropy_collapse": ("zero_variance",),
    "learning_rate_too_high": (
        "tool_parse_failures",
        "truncation",
        "entropy_collapse",
        "length_drift",
        "zero_variance",
        *("overfitting", "loss_not_falling", "gradient_spikes"),  # in a run that learns from rows
    ),
}
"""Consequences of a cause. They are not shown with it, since their own advice would mislead."""
PATIENCE = 5
"""Consecutive steps for which a cause must apply before a running run reports it."""
REMIND_STEPS = 50
"""Steps after which a cause is reported again."""
WATCHED_STEPS = 100
"""Steps by which a running run is judged, in addition to its first ones; this bounds the cost of a step."""


def diagnose(data: RolloutRunData | RowRunData) -> tuple[Finding, ...]:
    """Return what keeps this run from learning, the most likely cause first; nothing for a healthy run."""
    early = ended_early(data)
    if isinstance(data, RowRunData):
        findings = [finding for row_rule in rows.RULES if (finding := row_rule(data)) is not None]
    else:
        rules = RULES if data.by_rewards else WITHOUT_REWARDS
        findings = [finding for rule in rules if (finding := rule(data)) is not None]
    explained = {name for finding in findings for name in FOLLOWS.get(finding.name, ())}
    return (*early, *(finding for finding in findings if finding.name not in explained))


def ended_early(data: RolloutRunData | RowRunData) -> tuple[Finding, ...]:
    """Return what ended the run early, unless somebody stopped it: it stands before all causes."""
    if data.ended is None or data.ended.interrupted:
        return ()
    failed = () if isinstance(data, RowRunData) else (one for one in data.last if one.reward is None and one.error)
    return (
        Finding(
            name="ended_by_an_error",
            what=f"The run ended {'after step ' + str(data.rows[-1].step) if data.rows else 'before its first step'}, "
            f"with {data.ended.kind}.",
            evidence={"steps": float(len(data.rows))},
            examples=ids(failed),
            quotes=tuple(data.ended.message.splitlines()),
            advice="Do what the error says, then start the same again: it goes on after its last checkpoint, or begins "
            "anew.",
        ),
    )


def read_run(run_dir: Path) -> RolloutRunData | RowRunData:
    """Read the records of a run, which may still be running. A run without rollouts has only its metrics. One that
    ended before its first step has the rollouts of the check, and of the evaluation before it.

    Raises `ConfigError` if `run_dir` is not a run directory, `JournalError` if its journal cannot be read.
    """
    from sharpen.evidence.certificate.certify import read_resolved
    from sharpen.learning.experience.reading import count_outcomes, read_groups

    ended = read_ended(run_dir)
    for name in ("resolved.json",) if ended is not None else ("run.db", "resolved.json", "metrics.jsonl"):
        if not (run_dir / name).exists():
            raise ConfigError(f"{run_dir} is not a run directory: it has no {name}")
    recipe = recipe_of(read_resolved(run_dir / "resolved.json"))
    if isinstance(recipe, RowRecipe):
        metrics = run_dir / "metrics.jsonl"
        trained = read_rows(metrics, of="trainer/loss")
        evaluated = read_rows(metrics, of="eval/loss")
        held_out = tuple((row.step, row.metrics["eval/loss"]) for row in evaluated)
        return RowRunData(config=recipe.config, rows=trained, held_out=held_out, ended=ended)
    journal = next((path for path in (run_dir / "run.db", run_dir / EVALUATIONS) if _has_groups(path)), None)
    first = [] if journal is None else list(islice(read_groups(journal), MAX_GROUPS))
    last = [] if journal is None else list(read_groups(journal, last=MAX_GROUPS))
    return RolloutRunData(
        config=recipe.config,
        scale_free=scale_free(recipe.algorithm),
        rows=read_rows(run_dir / "metrics.jsonl"),
        first=tuple(rollout for group in first for rollout in digest_group(group)),
        last=tuple(rollout for group in last for rollout in digest_group(group)),
        outcomes={} if journal is None else count_outcomes(journal),
        held_out=_held_out(run_dir / "metrics.jsonl"),
        ended=ended,
    )


def _held_out(path: Path) -> tuple[tuple[int, float, float], ...]:
    """Return (step, mean reward, upper end of its interval) of the evaluations, greedy ones if there are any."""
    for mode in ("greedy", "sampled"):
        mean, high = f"eval/{mode}/accuracy", f"eval/{mode}/high"
        if found := read_rows(path, of=mean):
            return tuple((row.step, row.metrics[mean], row.metrics.get(high, math.inf)) for row in found)
    return ()


def _has_groups(journal: Path) -> bool:
    from sharpen.learning.experience.reading import find_rollouts

    return journal.exists() and bool(find_rollouts(journal, last=1))


def read_rows(path: Path, *, of: str = "rollout/count") -> tuple[StepRow, ...]:
    """Read the steps in `metrics.jsonl` that have the metric `of`, by default those that trained on rollouts. Numbers
    that are not finite, and a line cut off by a kill, are skipped. Raises `ConfigError` for a line that is damaged: a
    diagnosis over the others would not be one of this run."""
    steps: dict[int, dict[str, float]] = {}
    if not path.exists():  # the run ended before it had any
        return ()
    with path.open(encoding="utf-8", errors="replace") as file:
        for place, line in enumerate(file, 1):
            if not line.endswith("\n"):
                break
            try:
                content: dict[str, Any] = json.loads(line)
                numbers = {name: float(value) for name, value in content.items() if value is not None}
                steps.setdefault(int(numbers.pop("step")), {}).update(numbers)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ConfigError(f"{path} is damaged: line {place} is none of a step's numbers") from error
    return tuple(StepRow(step=step, metrics=numbers) for step, numbers in steps.items() if of in numbers)


def scale_free(algorithm: Algorithm) -> bool:
    """Return whether the algorithm's advantages stay the same when all rewards are scaled."""
    from sharpen.learning.algorithm.returns import Scores

    def advantages(rewards_G: Rewards) -> Rewards:
        scores = Scores.of_rollouts(rewards_G)
        named = [dict.fromkeys(algorithm.named_rewards, float(reward)) for reward in rewards_G]
        return algorithm.advantages(
            replace(scores, baselines_R=np.zeros(len(rewards_G)), metrics_R=np.array(named, np.object_))
        )

    return is_scale_free(advantages)


class Watch:
    """Diagnoses a run while it is running. Costs a few milliseconds per step and a bounded amount of memory."""

    def __init__(self, recipe: RolloutRecipe) -> None:
        self._config = recipe.config
        self._scale_free = scale_free(recipe.algorithm)
        self._first_rows: list[StepRow] = []
        self._rows: deque[StepRow] = deque(maxlen=WATCHED_STEPS)
        self._first: list[tuple[Digest, ...]] = []
        self._last: deque[tuple[Digest, ...]] = deque(maxlen=MAX_GROUPS)
        self._outcomes: deque[Counter[str]] = deque(maxlen=WATCHED_STEPS)
        self._consecutive: dict[str, int] = {}
        self._last_reported: dict[str, int] = {}

    def add(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> str | None:
        """Add a finished step. Returns a line to print if a cause has lasted and was not reported recently."""
        row = StepRow(step=step, metrics={name: value for name, value in metrics.items() if math.isfinite(value)})
        if len(self._first_rows) < MAX_EDGE:
            self._first_rows.append(row)
        else:
            self._rows.append(row)
        for group in groups[:MAX_GROUPS]:
            digests = digest_group(group)
            self._last.append(digests)
            if len(self._first) < MAX_GROUPS:
                self._first.append(digests)
        self._outcomes.append(
            Counter(rollout.outcome.value for group in groups for rollout in (*group.rollouts, *group.attempts))
        )
        return self._line(step, diagnose(self._data()))

    def _data(self) -> RolloutRunData:
        return RolloutRunData(
            config=self._config,
            scale_free=self._scale_free,
            rows=(*self._first_rows, *self._rows),
            first=tuple(rollout for group in self._first for rollout in group),
            last=tuple(rollout for group in self._last for rollout in group),
            outcomes=sum(self._outcomes, Counter()),
        )

    def _line(self, step: int, findings: Sequence[Finding]) -> str | None:
        self._consecutive = {finding.name: self._consecutive.get(finding.name, 0) + 1 for finding in findings}
        lasting = [finding for finding in findings if self._consecutive[finding.name] >= PATIENCE]
        due = [
            finding
            for finding in lasting
            if step - self._last_reported.get(finding.name, -REMIND_STEPS) >= REMIND_STEPS
        ]
        if not due or due[0] is not lasting[0]:  # a cause that explains the others was already reported
            return None
        self._last_reported[due[0].name] = step
        return f"diagnosis: {due[0].what} ({due[0].name})"
