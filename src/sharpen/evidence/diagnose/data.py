"""The data of a diagnosis: the numbers of each step, and digests of the first and last rollouts.

In: steps' metrics and `Group`s. Out: `RolloutRunData`, whose size does not depend on the number of rollouts.

Shape suffixes: S sampled tokens of a call, W n-grams of a call.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum, sqrt
from statistics import fmean

import numpy as np
import numpy.typing as npt

from sharpen.agent.rollout.statistics import own_metrics
from sharpen.agent.transcript import answer_text, content_text
from sharpen.config.functions import may_load
from sharpen.evidence.diagnose.series import StepRow, Steps, Trend, late_mean, trend
from sharpen.types import Call, CallStatus, Group, IntArray, Outcome, Rollout

Rewards = npt.NDArray[np.float64]

MAX_GROUPS = 24
"""Groups read from each end of a run: some hundred rollouts are representative, and fit in memory."""
NGRAM, WINDOW = 4, 64
"""Tokens of an n-gram; tokens within which a repetition counts, so that longer texts do not repeat more."""
LEAST_PAIRS = 16
"""Rollouts that a correlation needs."""
MAX_TEXT = 4000
"""Characters of an answer or a prompt that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A rollout in short. `cut` is whether the model reached a limit of tokens or context; `untrained` counts the calls
    without loss by reason (`greedy`, `left_out`, `unused`, `abandoned`, `empty`). `repeated` is the share of n-grams of
    its sampled tokens that occurred earlier in the same window, None if its calls are too short; `fingerprint` is equal
    for rollouts that sampled the same tokens. `metrics` were reported by workflow and judge. `said` is the beginning of
    the last answer, `asked` that of the first prompt."""

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
    said: str = ""
    asked: str = ""

    @property
    def num_trainable(self) -> int:
        """The number of calls that carry loss."""
        return self.num_calls - sum(self.untrained.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRunData(Steps):
    """The data of a run with rollouts. `first` and `last` are rollouts of the first and last groups, which may overlap;
    `outcomes` counts all attempts; `held_out` has (step, mean reward, its interval's upper end) of the evaluations.
    `scale_free` is whether advantages stay the same when all rewards are scaled."""

    scale_free: bool
    first: tuple[Digest, ...] = ()
    last: tuple[Digest, ...] = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    held_out: tuple[tuple[int, float, float], ...] = ()

    @property
    def by_rewards(self) -> bool:
        """Whether the run learns from rewards. Supposed where somebody else's code would have to say so."""
        from sharpen.learning.algorithm.advantages import advantage_named
        from sharpen.learning.algorithm.presets import algorithm_named

        algorithm, advantage = self.config.algorithm.algorithm_type, self.config.loss.advantage
        if not may_load(advantage or algorithm):
            return True
        return advantage_named(advantage or algorithm_named(algorithm).advantage).needs_reward

    @property
    def reward(self) -> Trend | None:
        """The trend of the mean reward."""
        return self.trend("reward/mean")

    @property
    def reward_range(self) -> tuple[float, float]:
        """The least and the greatest reward in the data; (0, 0) if there is none."""
        rewards = [rollout.reward for rollout in (*self.first, *self.last) if rollout.reward is not None]
        rewards += self.values("reward/mean")
        return (min(rewards), max(rewards)) if rewards else (0.0, 0.0)

    @property
    def solved(self) -> bool:
        """Whether the last steps come close to the greatest reward, so that groups without spread mean success."""
        least, most = self.reward_range
        late = late_mean(self.values("reward/mean"))
        return late is not None and most > least and (late - least) >= 0.9 * (most - least)

    @property
    def stalled(self) -> bool:
        """Whether the reward stopped rising too early: not solved, and no rise beyond noise in the second half of the
        run."""
        rewards = self.values("reward/mean")
        half = trend(rewards[len(rewards) // 2 :])
        return not self.solved and (half is None or half.z < 2.0)

    @property
    def flat_shares(self) -> list[float]:
        """The `flat_share` of each step that has one."""
        return [share for row in self.rows if (share := self.flat_share(row)) is not None]

    def flat_share(self, row: StepRow) -> float | None:
        """Return the share of a step's groups whose rewards are all equal."""
        count, flat = row.metrics.get("rollout/count"), row.metrics.get("reward/flat_groups")
        if not count or flat is None:
            return None
        return min(1.0, flat * self.config.algorithm.group_size / count)


def by_group(rollouts: Iterable[Digest]) -> dict[str, list[Digest]]:
    """Sort rollouts by their group."""
    groups: dict[str, list[Digest]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    return groups


def flat_rewards(rollouts: Iterable[Digest]) -> list[tuple[str, float | None]]:
    """Return, for each group with two or more rewards, its id and its common reward (None if they differ)."""
    common: list[tuple[str, float | None]] = []
    for group_id, members in by_group(rollouts).items():
        rewards = [rollout.reward for rollout in members if rollout.reward is not None]
        if len(rewards) > 1:
            common.append((group_id, rewards[0] if len(set(rewards)) == 1 else None))
    return common


def correlation(rollouts: Iterable[Digest], value: Callable[[Digest], float]) -> float | None:
    """Return the correlation of a value with the reward within groups, over the rollouts that have a reward; None if
    they are too few, or one of both does not differ within any group."""
    pairs: list[tuple[float, float]] = []
    for members in by_group(rollout for rollout in rollouts if rollout.reward is not None).values():
        rewards, values = [rollout.reward or 0.0 for rollout in members], [value(rollout) for rollout in members]
        means = fmean(rewards), fmean(values)
        pairs += [(reward - means[0], one - means[1]) for reward, one in zip(rewards, values, strict=True)]
    size = sqrt(fsum(x * x for x, _ in pairs) * fsum(y * y for _, y in pairs))
    return fsum(x * y for x, y in pairs) / size if len(pairs) >= LEAST_PAIRS and size > 0.0 else None


def digest_group(group: Group) -> tuple[Digest, ...]:
    """Digest the rollouts of a group."""
    return tuple(map(digest, group.rollouts))


def digest(rollout: Rollout) -> Digest:
    """Digest a rollout; the cost is linear in its sampled tokens (except for sorting n-grams)."""
    sampled = hashlib.blake2b(digest_size=12)
    for call in rollout.calls:
        sampled.update(call.sampled_ids_S.tobytes() + b"|")
    delivered = [call for call in rollout.calls if call.status in (CallStatus.USED, CallStatus.LEFT_OUT)]
    limits = (Outcome.CONTEXT_OVERFLOW, Outcome.TOKEN_LIMIT)
    return Digest(
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
        metrics=own_metrics(rollout.metrics),
        said=answer_text(rollout)[:MAX_TEXT],
        asked=_prompt_text(rollout)[:MAX_TEXT],
    )


def _prompt_text(rollout: Rollout) -> str:
    """Return the text of the messages before the first answer."""
    messages = rollout.calls[0].messages if rollout.calls else ()
    return "\n".join(content_text(message.get("content")) for message in messages)


def repeated_share(calls: Iterable[IntArray]) -> float | None:
    """Return the share of n-grams that occurred earlier in the same window of the same call; None without any
    n-gram."""
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
    """Return whether advantages (a function of one group's rewards) stay the same when the rewards are 1000 times as
    large."""
    rewards_G = np.array([0.0, 1.0, 0.0, 3.0])
    return bool(np.allclose(advantages(rewards_G), advantages(1000.0 * rewards_G), rtol=0.01))
