"""Replay: trained groups stay in memory for a while, and may be trained again along with the fresh groups of a step.

In: the groups of each trained step with their batches or, on resume, the journal. Out: groups to train again, drawn at
random by priority, without replacement; the same ones for the same seed, step and memory.

Sources: prioritized replay by the size of the learning signal, arXiv 1511.05952, sections 3.2 and 3.3 (there the error
of a single transition, here the mean absolute advantage of a group); replay of recent groups in GRPO: RePO, arXiv
2506.09340, section 3. The importance weights of the former (its β) are left out: training some tasks more often is
intended, as with filters and refill, and the loss corrects for the older policy with the ratio of each token.

Shape suffixes: N groups in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from sharpen.config.public import AlgorithmConfig
from sharpen.config.run import SamplingConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.advantages import ADVANTAGES
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.experience.draw import Batch, left_out
from sharpen.learning.experience.merge import has_ratios, merge
from sharpen.learning.experience.reading import read_trained_groups
from sharpen.types import Experience, Group

EXPONENT = 0.6
"""How much larger signals are preferred: 0 not at all, 1 proportionally. Source: arXiv 1511.05952, section 4."""
DEFAULT_STEPS = 4
"""Default of `sampling.max_staleness`, in steps."""
_STREAM = 4
"""Distinguishes this stream of random numbers from others with the same seed."""


def priority(kind: Literal["signal", "recency"], *, signal: float, age: int, uses: int, max_staleness: int) -> float:
    """Return the relative odds of drawing a group: `(1 - age / (max_staleness + 1)) / 2^(uses - 1)`, and for the kind
    `signal` this times `signal^0.6`.

    `signal` is the group's mean absolute advantage, `age` the number of versions that its oldest token is behind,
    `uses` the number of steps that have trained it. The odds are 0 if the group is too old or `signal` is 0.
    """
    if age > max_staleness or signal <= 0.0:
        return 0.0
    value: float = signal**EXPONENT if kind == "signal" else 1.0
    return value * (1.0 - age / (max_staleness + 1)) * 0.5 ** (uses - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayGroup:
    """A group in memory, with the policy version of its oldest token, its mean absolute advantage when it was last
    trained, and the number of steps that have trained it."""

    group: Group
    oldest: int
    signal: float
    uses: int

    def age(self, version: int) -> int:
        """Return how many policy versions its oldest token is behind `version`."""
        return version - self.oldest


def oldest_version(group: Group) -> int:
    """Return the lowest policy version at which a trainable token of the group was sampled."""
    calls = (call for rollout in group.scored for call in rollout.calls if call.trainable)
    return min((int(call.versions_S.min()) for call in calls), default=group.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Settings of replay: at most `count` groups per step are trained again, chosen by `priority`, and none with a
    token more than `max_staleness` versions behind. When a group is first trained, its tokens are at most `ahead`
    versions behind."""

    count: int
    max_staleness: int
    seed: int
    priority: Literal["signal", "recency"] = "signal"
    ahead: int = 0


def replay_settings(
    settings: SamplingConfig, chosen: AlgorithmConfig, algorithm: Algorithm, *, seed: int, updates: int, ahead: int
) -> ReplaySettings | None:
    """Read the settings of replay; None without replay. A step makes `updates`; `ahead` is how many policy versions
    rollouts may run ahead of training. Raises `ConfigError` if the algorithm cannot be combined with replay, or
    settings have no effect."""
    if settings.replay_share == 0:
        _refuse_unused(settings)
        return None
    _refuse_on_policy(chosen.algorithm_type, algorithm)
    count = int(settings.replay_share * chosen.batch_size)
    if count < 1:
        raise ConfigError(
            f"sampling.replay_share is {settings.replay_share:g}, which is less than one group for a step of "
            f"{chosen.batch_size} tasks: set at least {1 / chosen.batch_size:.3g}, or 0"
        )
    bound = DEFAULT_STEPS * updates + ahead if settings.max_staleness is None else settings.max_staleness
    if bound < updates + ahead:
        running = f" and rollouts run up to {ahead} versions ahead of it (sync)" if ahead else ""
        raise ConfigError(
            f"sampling.max_staleness is {bound}, but one step makes {updates} updates (trainer.num_minibatches × "
            f"trainer.epochs){running}, so all groups would be too old in the next step: set at least "
            f"{updates + ahead}"
        )
    return ReplaySettings(count=count, max_staleness=bound, seed=seed, priority=settings.replay_priority, ahead=ahead)


class Replay:
    """The memory of groups. Call `draw` before a step is trained, `keep` afterwards, and `restore` on resume."""

    def __init__(self, settings: ReplaySettings) -> None:
        self.max_staleness = settings.max_staleness
        self._settings = settings
        self._kept: dict[str, ReplayGroup] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def draw(self, step: int, version: int) -> tuple[ReplayGroup, ...]:
        """Draw groups to train again in `step`, which starts at policy `version`, in the order of drawing. Groups that
        are too old are removed from the memory. Takes O(n log n)."""
        self._kept = {id_: kept for id_, kept in self._kept.items() if kept.age(version) <= self.max_staleness}
        candidates = list(self._kept.values())
        if not candidates:
            return ()
        weights_N = np.array(
            [
                priority(
                    self._settings.priority,
                    signal=kept.signal,
                    age=kept.age(version),
                    uses=kept.uses,
                    max_staleness=self.max_staleness,
                )
                for kept in candidates
            ]
        )
        # Weighted sampling without replacement: Efraimidis and Spirakis, "Weighted random sampling with a reservoir".
        uniform_N = np.random.default_rng([self._settings.seed, step, _STREAM]).random(len(candidates))
        ranking_N = np.argsort(np.log1p(-uniform_N) / -weights_N, kind="stable")
        return tuple(candidates[place] for place in ranking_N[: self._settings.count].tolist())

    def keep(self, groups: Iterable[Group], batches: Iterable[Batch]) -> None:
        """Record that these groups were trained in these batches: add fresh ones, and count another use of replayed
        ones. Groups whose advantages are all 0 are not kept, since they teach nothing."""
        signals = _signals(batches)
        for group in groups:
            before = self._kept.get(group.id)
            self._note(group, signals.get(group.id, 0.0), 1 if before is None else before.uses + 1)

    def restore(self, journal: Path, algorithm: Algorithm, *, step: int, version: int) -> None:
        """Restore the memory as it was after `step`, at policy `version`. Raises `JournalError`."""
        self._kept = {}
        oldest = version - self.max_staleness - self._settings.ahead  # a group's tokens may be newer than its start
        for group, calls in read_trained_groups(journal, last_step=step, oldest=oldest):
            last = max((call.step for call in calls), default=0)
            if last and left_out(group, algorithm) is None:
                advantages = [abs(call.advantage) for call in calls if call.step == last]
                self._note(group, _mean(advantages), len({call.step for call in calls}))

    def metrics(self, replayed: Sequence[ReplayGroup], version: int) -> dict[str, float]:
        """Return metrics about the groups replayed in a step that started at `version`."""
        ages = [kept.age(version) for kept in replayed]
        return {
            "batch/groups_replayed": float(len(replayed)),
            "batch/replay_age_mean": _mean(ages),
            "batch/replay_age_max": float(max(ages, default=0)),
            "batch/replay_uses_max": float(max((kept.uses for kept in replayed), default=0)),
            "batch/replay_memory": float(len(self._kept)),
        }

    def _note(self, group: Group, signal: float, uses: int) -> None:
        if signal > 0.0:
            self._kept[group.id] = ReplayGroup(group=group, oldest=oldest_version(group), signal=signal, uses=uses)
        else:
            self._kept.pop(group.id, None)


def mixed(fresh: Sequence[Group], replayed: Sequence[Group], algorithm: Algorithm) -> tuple[Group, ...]:
    """Order the groups of a step for splitting into minibatches: replayed groups evenly spread among the trained fresh
    ones, starting with a fresh one, then the groups that are left out."""
    if not replayed:
        return tuple(fresh)
    training = [group for group in fresh if left_out(group, algorithm) is None]
    rest = [group for group in fresh if left_out(group, algorithm) is not None]
    places = [(number / len(training), group) for number, group in enumerate(training)]
    places += [((number + 0.5) / len(replayed), group) for number, group in enumerate(replayed)]
    return (*(group for _, group in sorted(places, key=lambda place: place[0])), *rest)


def probe(groups: Sequence[Group], version: int) -> tuple[Experience, ...]:
    """Return the sequences of one fresh group, to compare with the engine in a step that may train only older tokens;
    empty if no token has this policy version, as happens when rollouts run ahead."""
    for group in groups:
        sequences = [one for rollout in group.scored if has_ratios(rollout) for one in merge(rollout)]
        if any((one.versions_T[one.loss_mask_T] == version).any() for one in sequences):
            return tuple(sequences)
    return ()


def _signals(batches: Iterable[Batch]) -> Mapping[str, float]:
    """Return the mean absolute advantage of each group over its calls with loss, by group id."""
    magnitudes: dict[str, list[float]] = {}
    for batch in batches:
        for experience in batch.experiences:
            mask_T = experience.loss_mask_T
            _, firsts = np.unique(experience.calls_T[mask_T], return_index=True)
            advantages = experience.advantages_T[mask_T][firsts].tolist()
            magnitudes.setdefault(experience.group_id, []).extend(map(abs, advantages))
    return {group_id: _mean(values) for group_id, values in magnitudes.items()}


def _mean(values: Sequence[float]) -> float:
    """Return the mean, computed exactly, so that it does not depend on the order."""
    return math.fsum(values) / len(values) if values else 0.0


def _refuse_unused(settings: SamplingConfig) -> None:
    """Raise `ConfigError` for settings of replay without `replay_share`."""
    default = SamplingConfig()
    for name in ("replay_priority", "max_staleness"):
        if (value := getattr(settings, name)) != getattr(default, name):
            raise ConfigError(
                f"sampling.{name} is {value!r}, but has no effect without replay: set sampling.replay_share too, or "
                "leave it out"
            )


def _refuse_on_policy(name: str, algorithm: Algorithm) -> None:
    """Raise `ConfigError` for algorithms that cannot train on groups of an older policy."""
    if algorithm.needs_critic:
        raise ConfigError(
            f"sampling.replay_share cannot be used with the critic of {name!r}: the returns of replayed rollouts are "
            "those of an older policy, and the ratio of a token does not correct for what came after it; set it to 0, "
            "or loss.advantage to one without a critic (grpo, rloo)"
        )
    if algorithm.needs_teacher:
        raise ConfigError(
            f"sampling.replay_share cannot be used with {name!r}, where a teacher scores what the current policy "
            "says: set it to 0"
        )
    if algorithm.by_role:
        raise ConfigError(
            f"sampling.replay_share cannot be used with {algorithm.advantage!r}: the rewards of replayed rollouts have "
            "moved the baselines that they would be compared with; set it to 0, or loss.advantage to one of a group "
            "(grpo, rloo)"
        )
    if algorithm.of_advantage.second is None and algorithm.advantage not in ADVANTAGES:
        raise ConfigError(
            f"sampling.replay_share draws groups by their advantages, and {algorithm.advantage!r} brings no second "
            "formula to check them with: set it to 0, or give the advantage a second formula (docs/use/extending.md)"
        )
    if not algorithm.off_policy:
        raise ConfigError(
            f"sampling.replay_share needs a policy loss that corrects for older policies, but "
            f"{algorithm.policy_loss!r} of {name!r} has no probability ratio and would be biased: set it to 0, or "
            "loss.policy_loss to one that corrects (ppo, importance_sampling, topr, opmd)"
        )
