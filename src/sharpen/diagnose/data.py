"""What a diagnosis looks at: the numbers of each step, and digests of the first and the last rollouts.

In: steps' metrics and `Group`s. Out: `RunData`, small whatever the length of the run, and the few statistics that the
rules share: edges of a series (its first and last steps), noise, trends.

Shape suffixes: S sampled tokens of a call, W n-grams of a call, N steps.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from sharpen.config.run import RunConfig
from sharpen.rollout.statistics import given
from sharpen.types import Call, CallStatus, Group, IntArray, Outcome, Rollout

Rewards = npt.NDArray[np.float64]

MAX_GROUPS = 24
"""Groups looked at from either end of a run: some hundred rollouts say what all of them do, and fit in memory."""
MIN_TREND_STEPS = 6
"""Below this, the first and the last steps of a run cannot be told from its noise."""
MAX_EDGE = 25
"""Steps at either end that are averaged, at most: more would blur what changes late in a long run."""
NGRAM, WINDOW = 4, 64
"""Tokens of an n-gram; tokens within which a repetition counts, so that longer texts do not repeat more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The numbers of one trained step, as in `metrics.jsonl`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A rollout in short. `cut` is whether the model ran into a limit of tokens or context; `untrained` says of calls
    without loss why (`greedy`, `left_out`, `unused`, `abandoned`, `empty`). `repeated` is the share of n-grams of its
    sampled tokens that came before within the same window, None where a call is too short to tell; `fingerprint` is
    equal for rollouts that sampled the same tokens. `metrics` are what workflow and judge gave.
    """

    id: str
    group_id: str
    task_id: str
    outcome: Outcome
    reward: float | None
    error: str | None = None
    num_calls: int = 1
    num_tokens: int = 0
    cut: bool = False
    parse_errors: int = 0
    untrained: Mapping[str, int] = field(default_factory=dict)
    repeated: float | None = None
    fingerprint: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_trainable(self) -> int:
        """Calls that carry loss."""
        return self.num_calls - sum(self.untrained.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """A run as a diagnosis sees it. `first` and `last` are rollouts of the first and last groups, which may overlap;
    `outcomes` counts all attempts. `scale_free` is whether advantages stay the same when all rewards are scaled.
    """

    config: RunConfig
    scale_free: bool
    rows: tuple[Row, ...]
    first: tuple[Seen, ...] = ()
    last: tuple[Seen, ...] = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)

    def values(self, name: str) -> list[float]:
        """A metric over the steps that have it."""
        return [row.metrics[name] for row in self.rows if name in row.metrics]

    def trend(self, name: str) -> Trend | None:
        """How a metric went, None where too few steps have it."""
        return trend(self.values(name))

    @property
    def by_rewards(self) -> bool:
        """Whether the run learns from rewards at all."""
        from sharpen.algorithm.advantages import ADVANTAGES
        from sharpen.algorithm.presets import PRESETS

        return ADVANTAGES[
            self.config.loss.advantage or PRESETS[self.config.algorithm.algorithm_type].advantage
        ].needs_reward

    @property
    def reward(self) -> Trend | None:
        """How the mean reward went."""
        return self.trend("reward/mean")

    @property
    def reward_range(self) -> tuple[float, float]:
        """The least and the greatest reward seen; (0, 0) if none was."""
        rewards = [seen.reward for seen in (*self.first, *self.last) if seen.reward is not None]
        rewards += self.values("reward/mean")
        return (min(rewards), max(rewards)) if rewards else (0.0, 0.0)

    @property
    def solved(self) -> bool:
        """Whether the last steps come close to the greatest reward, so that groups without spread are a success."""
        least, most = self.reward_range
        late = late_mean(self.values("reward/mean"))
        return late is not None and most > least and (late - least) >= 0.9 * (most - least)

    @property
    def stalled(self) -> bool:
        """Whether the reward stopped short: not solved, and no rise beyond noise in the second half of the run."""
        rewards = self.values("reward/mean")
        half = trend(rewards[len(rewards) // 2 :])
        return not self.solved and (half is None or half.z < 2.0)

    @property
    def flat_shares(self) -> list[float]:
        """For each step that has it, its `flat_share`."""
        return [share for row in self.rows if (share := self.flat_share(row)) is not None]

    def flat_share(self, row: Row) -> float | None:
        """Share of a step's groups whose rewards are all the same."""
        count, flat = row.metrics.get("rollout/count"), row.metrics.get("reward/flat_groups")
        if not count or flat is None:
            return None
        return min(1.0, flat * self.config.algorithm.group_size / count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A series over the steps: means of its first and last steps, its highest running mean (over fewer steps, since a
    collapse can come early) and where that is (counted from 0), the noise of a single step, and in standard errors the
    change from first to last (`z`) and the fall from the peak to the last (`fall_z`).
    """

    early: float
    late: float
    peak: float
    peak_at: int
    noise: float
    z: float
    fall_z: float


def trend(values: Sequence[float]) -> Trend | None:
    """None where there are fewer than `MIN_TREND_STEPS` values."""
    if len(values) < MIN_TREND_STEPS:
        return None
    width = edge(len(values))
    early, late = fmean(values[:width]), fmean(values[-width:])
    narrow = max(1, width // 3)
    sums_N = np.cumsum([0.0, *values])
    means_N = (sums_N[narrow:] - sums_N[:-narrow]) / narrow
    peak = float(means_N.max())
    # Neighbours differ by noise, not by trend; the median of such differences is 0.954 standard deviations.
    noise = median(abs(b - a) for a, b in pairwise(values)) / 0.954
    least = max(1e-9 * max(abs(early), abs(late)), 1e-12)
    return Trend(
        early=early,
        late=late,
        peak=peak,
        peak_at=int(means_N.argmax()) + narrow // 2,
        noise=noise,
        z=(late - early) / max(noise * math.sqrt(2 / width), least),
        fall_z=(peak - late) / max(noise * math.sqrt(1 / narrow + 1 / width), least),
    )


def edge(num_steps: int) -> int:
    """How many steps at either end are averaged."""
    return max(1, min(MAX_EDGE, num_steps // 4))


def early_mean(values: Sequence[float]) -> float | None:
    """Mean of the first steps; None where there are none."""
    return fmean(values[: edge(len(values))]) if values else None


def late_mean(values: Sequence[float]) -> float | None:
    """Mean of the last steps; None where there are none."""
    return fmean(values[-edge(len(values)) :]) if values else None


def slope_t(values: Sequence[float]) -> float:
    """The slope of a straight line through the values, in standard errors (Student's t); 0 where nothing changes."""
    values_N = np.asarray(values, np.float64)
    steps_N = np.arange(len(values_N)) - (len(values_N) - 1) / 2
    centred_N = values_N - values_N.mean()
    square = float(steps_N @ steps_N)
    slope = float(steps_N @ centred_N) / square
    rest = float(np.sum((centred_N - slope * steps_N) ** 2)) / max(1, len(values_N) - 2)
    scale = max(1e-9 * float(np.abs(values_N).max(initial=0.0)), 1e-12)
    return slope / max(math.sqrt(rest / square), scale / math.sqrt(square))


def by_group(seen: Iterable[Seen]) -> dict[str, list[Seen]]:
    """Rollouts by their group."""
    groups: dict[str, list[Seen]] = {}
    for one in seen:
        groups.setdefault(one.group_id, []).append(one)
    return groups


def flat_rewards(seen: Iterable[Seen]) -> list[tuple[str, float | None]]:
    """For each group with two or more rewards: its id, and its one reward, None if they differ."""
    found: list[tuple[str, float | None]] = []
    for group_id, members in by_group(seen).items():
        rewards = [one.reward for one in members if one.reward is not None]
        if len(rewards) > 1:
            found.append((group_id, rewards[0] if len(set(rewards)) == 1 else None))
    return found


def digest_group(group: Group) -> tuple[Seen, ...]:
    """The rollouts of a group in short."""
    return tuple(map(digest, group.rollouts))


def digest(rollout: Rollout) -> Seen:
    """A rollout in short; cost is linear in its sampled tokens (but for sorting n-grams)."""
    sampled = hashlib.blake2b(digest_size=12)
    for call in rollout.calls:
        sampled.update(call.sampled_ids_S.tobytes() + b"|")
    delivered = [call for call in rollout.calls if call.status in (CallStatus.USED, CallStatus.LEFT_OUT)]
    limits = (Outcome.CONTEXT_OVERFLOW, Outcome.TOKEN_LIMIT)
    return Seen(
        id=rollout.id,
        group_id=rollout.group_id,
        task_id=rollout.task_id,
        outcome=rollout.outcome,
        reward=rollout.reward,
        error=rollout.error,
        num_calls=len(rollout.calls),
        num_tokens=sum(len(call.sampled_ids_S) for call in rollout.calls),
        cut=rollout.outcome in limits or any(call.finish_reason == "length" for call in delivered),
        parse_errors=round(rollout.metrics.get("gateway/tool_parse_errors", 0.0)),
        untrained=Counter(_why_untrained(call) for call in rollout.calls if not call.trainable),
        repeated=repeated_share(call.sampled_ids_S for call in delivered),
        fingerprint=sampled.hexdigest(),
        metrics=given(rollout.metrics),
    )


def repeated_share(calls: Iterable[IntArray]) -> float | None:
    """Share of n-grams that came before in the same window of the same call; None without any n-gram."""
    num_grams = num_distinct = 0
    factors = np.array([1, 1_000_003, 998_244_353, 2_147_483_647], np.uint64)
    for ids_S in calls:
        num = len(ids_S) - NGRAM + 1
        if num < 1:
            continue
        grams_W = np.zeros(num, np.uint64)
        for offset, factor in enumerate(factors):
            grams_W += ids_S[offset : offset + num].astype(np.uint64) * factor
        grams_W += (np.arange(num, dtype=np.uint64) // np.uint64(WINDOW)) * np.uint64(0x9E37_79B9_7F4A_7C15)
        num_grams += num
        num_distinct += len(np.unique(grams_W))
    return 1.0 - num_distinct / num_grams if num_grams else None


def _why_untrained(call: Call) -> str:
    if call.status != CallStatus.USED:
        return call.status.value
    return "empty" if len(call.sampled_ids_S) == 0 else "greedy"


def is_scale_free(advantages: Callable[[Rewards], Rewards]) -> bool:
    """Whether advantages (a function of the rewards of one group) stay the same when the rewards are 1000 times as
    large."""
    rewards_G = np.array([0.0, 1.0, 0.0, 3.0])
    return bool(np.allclose(advantages(rewards_G), advantages(1000.0 * rewards_G), rtol=0.01))
