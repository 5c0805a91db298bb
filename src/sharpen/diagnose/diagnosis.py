"""All rules, in the order in which one cause explains another; a run's records; and the diagnosis of a run in motion.

In: a run directory, or each step as it is done (`Watch`). Out: `Finding`s, the first one the likeliest cause of all.
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

from sharpen.algorithm.presets import Algorithm
from sharpen.diagnose import policy, rewards, rollouts, rows
from sharpen.diagnose.data import MAX_GROUPS, Digest, Rewards, RolloutRunData, digest_group, is_scale_free
from sharpen.diagnose.finding import Finding
from sharpen.diagnose.rows import RowRunData
from sharpen.diagnose.series import MAX_EDGE, StepRow
from sharpen.errors import ConfigError
from sharpen.recipe import RolloutRecipe, RowRecipe, recipe_of
from sharpen.types import Group

RULES: tuple[Callable[[RolloutRunData], Finding | None], ...] = (
    # what the records lack, then what made it so
    rollouts.excluded,
    rollouts.empty_masks,
    rewards.reward_scale,
    rewards.parts_apart,
    policy.learning_rate_too_high,  # a broken policy makes malformed calls and endless answers, too
    rollouts.tool_parse_failures,
    rollouts.truncation,
    policy.kl_blow_up,
    policy.entropy_collapse,
    rollouts.degenerate_text,
    rollouts.length_drift,
    policy.clip_fraction,
    # no signal, or one that is not used
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
"""Those for a run that learns from a teacher, whatever the rewards: the others go by rewards, or find wrong what a
teacher may well ask for (less entropy, other lengths)."""
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "all_wrong": ("zero_variance",),
    "all_right": ("zero_variance",),
    "entropy_collapse": ("zero_variance",),
    "learning_rate_too_high": (
        "tool_parse_failures",
        "truncation",
        "entropy_collapse",
        "length_drift",
        "zero_variance",
        *("overfitting", "loss_not_falling", "gradient_spikes"),  # of a run that learns from rows
    ),
}
"""What follows from a cause: not shown beside it, since its own advice would mislead."""
PATIENCE = 5
"""Steps in a row for which a cause must apply before a running run speaks of it."""
REMIND_STEPS = 50
"""Steps after which it is said again."""
WATCHED_STEPS = 100
"""Steps that a running run is judged by, besides its first ones; this bounds the cost of a step."""


def diagnose(data: RolloutRunData | RowRunData) -> tuple[Finding, ...]:
    """What keeps this run from learning, the likeliest cause first; nothing for a healthy run."""
    if isinstance(data, RowRunData):
        found = [finding for of_rows in rows.RULES if (finding := of_rows(data)) is not None]
    else:
        rules = RULES if data.by_rewards else WITHOUT_REWARDS
        found = [finding for rule in rules if (finding := rule(data)) is not None]
    explained = {name for finding in found for name in FOLLOWS.get(finding.name, ())}
    return tuple(finding for finding in found if finding.name not in explained)


def read_run(run_dir: Path) -> RolloutRunData | RowRunData:
    """The records of a run, also while it goes on; those of a run without rollouts are its metrics alone.

    Raises `ConfigError` if `run_dir` is not a run's directory, `JournalError` if its journal cannot be read.
    """
    from sharpen.certificate.certify import read_resolved
    from sharpen.experience.reading import count_outcomes, read_groups

    for name in ("run.db", "resolved.json", "metrics.jsonl"):
        if not (run_dir / name).exists():
            raise ConfigError(f"{run_dir} is not a run directory: it has no {name}")
    journal = run_dir / "run.db"
    recipe = recipe_of(read_resolved(run_dir / "resolved.json"))
    if isinstance(recipe, RowRecipe):
        metrics = run_dir / "metrics.jsonl"
        trained = read_rows(metrics, of="trainer/loss")
        evaluated = read_rows(metrics, of="eval/loss")
        held_out = tuple((row.step, row.metrics["eval/loss"]) for row in evaluated)
        return RowRunData(config=recipe.config, rows=trained, held_out=held_out)
    first = [seen for group in islice(read_groups(journal), MAX_GROUPS) for seen in digest_group(group)]
    last = [seen for group in read_groups(journal, last=MAX_GROUPS) for seen in digest_group(group)]
    return RolloutRunData(
        config=recipe.config,
        scale_free=scale_free(recipe.algorithm),
        rows=read_rows(run_dir / "metrics.jsonl"),
        first=tuple(first),
        last=tuple(last),
        outcomes=count_outcomes(journal),
    )


def read_rows(path: Path, *, of: str = "rollout/count") -> tuple[StepRow, ...]:
    """The steps in `metrics.jsonl` that have the metric `of`, by default those that trained on rollouts; what is not
    finite, or cut short by a kill, is left out."""
    steps: dict[int, dict[str, float]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break
            content: dict[str, Any] = json.loads(line)
            numbers = {name: value for name, value in content.items() if name != "step" and value is not None}
            steps.setdefault(content["step"], {}).update(numbers)
    return tuple(StepRow(step=step, metrics=numbers) for step, numbers in steps.items() if of in numbers)


def scale_free(algorithm: Algorithm) -> bool:
    """Whether the algorithm's advantages stay the same when all rewards are scaled."""
    from sharpen.algorithm.returns import Scores

    def advantages(rewards_G: Rewards) -> Rewards:
        scores = Scores.of_rollouts(rewards_G)
        return algorithm.advantages(replace(scores, baselines_R=np.zeros(len(rewards_G))))

    return is_scale_free(advantages)


class Watch:
    """Diagnoses a run while it goes on. Costs each step a few milliseconds and a bounded amount of memory."""

    def __init__(self, recipe: RolloutRecipe) -> None:
        self._config = recipe.config
        self._scale_free = scale_free(recipe.algorithm)
        self._first_rows: list[StepRow] = []
        self._rows: deque[StepRow] = deque(maxlen=WATCHED_STEPS)
        self._first: list[tuple[Digest, ...]] = []
        self._last: deque[tuple[Digest, ...]] = deque(maxlen=MAX_GROUPS)
        self._outcomes: deque[Counter[str]] = deque(maxlen=WATCHED_STEPS)
        self._in_a_row: dict[str, int] = {}
        self._said: dict[str, int] = {}

    def add(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> str | None:
        """Take a finished step in. A line for people if a cause has lasted and was not just said."""
        row = StepRow(step=step, metrics={name: value for name, value in metrics.items() if math.isfinite(value)})
        if len(self._first_rows) < MAX_EDGE:
            self._first_rows.append(row)
        else:
            self._rows.append(row)
        for group in groups[:MAX_GROUPS]:
            seen = digest_group(group)
            self._last.append(seen)
            if len(self._first) < MAX_GROUPS:
                self._first.append(seen)
        self._outcomes.append(
            Counter(one.outcome.value for group in groups for one in (*group.rollouts, *group.attempts))
        )
        return self._line(step, diagnose(self._data()))

    def _data(self) -> RolloutRunData:
        return RolloutRunData(
            config=self._config,
            scale_free=self._scale_free,
            rows=(*self._first_rows, *self._rows),
            first=tuple(one for group in self._first for one in group),
            last=tuple(one for group in self._last for one in group),
            outcomes=sum(self._outcomes, Counter()),
        )

    def _line(self, step: int, findings: Sequence[Finding]) -> str | None:
        self._in_a_row = {found.name: self._in_a_row.get(found.name, 0) + 1 for found in findings}
        lasting = [found for found in findings if self._in_a_row[found.name] >= PATIENCE]
        due = [found for found in lasting if step - self._said.get(found.name, -REMIND_STEPS) >= REMIND_STEPS]
        if not due or due[0] is not lasting[0]:  # a cause that explains the others was said already
            return None
        self._said[due[0].name] = step
        return f"diagnosis: {due[0].what} ({due[0].name})"
