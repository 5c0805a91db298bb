"""Replay: groups that have trained stay in memory for a while, and may train once more beside the fresh ones of a step.

In: the groups of each trained step with their batches, or on resume the journal. Out: groups to train again, drawn at
random without replacement by their priority; the same ones for the same seed, step and memory.

Sources: prioritized replay by the size of the learning signal, arXiv 1511.05952, sections 3.2 and 3.3 (there the error
of a single transition, here the mean absolute advantage of a group); replay of recent groups in GRPO: RePO, arXiv
2506.09340, section 3. The former's importance weights (its β) are left out: which tasks train more is a choice here, as
with filters and refill, and the drift of the policy is corrected by the loss, by each token's own ratio.

Shape suffixes: N groups in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from sharpen.algorithm.presets import Algorithm
from sharpen.config.run import RunConfig, SamplingConfig
from sharpen.errors import ConfigError
from sharpen.experience.draw import Batch, left_out
from sharpen.experience.merge import merge, whole_support
from sharpen.experience.reading import read_trained_groups
from sharpen.types import Experience, Group

EXPONENT = 0.6
"""How much a larger signal is preferred; 0 not at all, 1 in proportion. Source: arXiv 1511.05952, section 4."""
DEFAULT_STEPS = 4
"""Steps whose updates a group may be behind where `sampling.max_staleness` does not say."""
_STREAM = 4
"""Tells this stream of random numbers from others of the same seed."""


def priority(kind: Literal["signal", "recency"], *, signal: float, age: int, uses: int, max_staleness: int) -> float:
    """The odds of a group: `(1 - age / (max_staleness + 1)) / 2^(uses - 1)`, with `signal` times `signal^0.6`.

    `signal` is its mean absolute advantage, `age` how many versions its oldest token is behind, `uses` how many steps
    have trained it. 0 for a group that is too old, or has nothing to teach.
    """
    if age > max_staleness or signal <= 0.0:
        return 0.0
    value: float = signal**EXPONENT if kind == "signal" else 1.0
    return value * (1.0 - age / (max_staleness + 1)) * 0.5 ** (uses - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayGroup:
    """A group in memory, the policy version of its oldest token, its mean absolute advantage when it last trained, and
    how many steps have trained it."""

    group: Group
    oldest: int
    signal: float
    uses: int

    def age(self, version: int) -> int:
        """Policy versions that its oldest token is behind `version`."""
        return version - self.oldest


def oldest_version(group: Group) -> int:
    """The lowest policy version that a trainable token of the group was sampled at."""
    calls = (call for rollout in group.scored for call in rollout.calls if call.trainable)
    return min((int(call.versions_S.min()) for call in calls), default=group.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """At most `count` groups train again in a step, preferred by `priority`, none with a token more than
    `max_staleness` versions behind. A group trains first when its tokens are at most `ahead` versions behind."""

    count: int
    max_staleness: int
    seed: int
    priority: Literal["signal", "recency"] = "signal"
    ahead: int = 0


def replay_settings(config: RunConfig, algorithm: Algorithm, *, ahead: int) -> ReplaySettings | None:
    """As configured; None without replay. `ahead` is how many policy versions rollouts may run ahead of the training.
    Raises `ConfigError` where replay would be wrong, or settings of it have no effect."""
    settings = config.sampling
    if settings.replay_share == 0:
        _refuse_idle(settings)
        return None
    _refuse_on_policy(config, algorithm)
    count = int(settings.replay_share * config.algorithm.batch_size)
    if count < 1:
        raise ConfigError(
            f"sampling.replay_share is {settings.replay_share:g}, which is no whole group for a step of "
            f"{config.algorithm.batch_size} tasks: set at least {1 / config.algorithm.batch_size:.3g}, or 0"
        )
    updates = config.trainer.num_minibatches * config.trainer.epochs
    bound = DEFAULT_STEPS * updates + ahead if settings.max_staleness is None else settings.max_staleness
    if bound < updates + ahead:
        running = f" and rollouts run up to {ahead} versions ahead of it (sync)" if ahead else ""
        raise ConfigError(
            f"sampling.max_staleness is {bound}, but one step makes {updates} updates (trainer.num_minibatches × "
            f"trainer.epochs){running}, so that groups are older when the next one trains: set at least "
            f"{updates + ahead}"
        )
    return ReplaySettings(
        count=count, max_staleness=bound, seed=config.seed, priority=settings.replay_priority, ahead=ahead
    )


class Replay:
    """The memory. `draw` before a step trains, `keep` when it has trained; `restore` on resume."""

    def __init__(self, settings: ReplaySettings) -> None:
        self.max_staleness = settings.max_staleness
        self._settings = settings
        self._kept: dict[str, ReplayGroup] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def draw(self, step: int, version: int) -> tuple[ReplayGroup, ...]:
        """Groups to train again in `step`, which starts at policy `version`, the first drawn first. Groups that are
        too old leave the memory. Cost: n log n."""
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
        # A weighted draw without replacement: Efraimidis and Spirakis, "Weighted random sampling with a reservoir".
        uniform_N = np.random.default_rng([self._settings.seed, step, _STREAM]).random(len(candidates))
        ranking_N = np.argsort(np.log1p(-uniform_N) / -weights_N, kind="stable")
        return tuple(candidates[place] for place in ranking_N[: self._settings.count].tolist())

    def keep(self, groups: Iterable[Group], batches: Iterable[Batch]) -> None:
        """Note that these groups trained, in these batches: fresh ones come in, those that trained again count one use
        more. Groups without an advantage are not kept: there is nothing to learn from them."""
        signals = _signals(batches)
        for group in groups:
            before = self._kept.get(group.id)
            self._note(group, signals.get(group.id, 0.0), 1 if before is None else before.uses + 1)

    def restore(self, journal: Path, algorithm: Algorithm, *, step: int, version: int) -> None:
        """Fill the memory with what it held after `step`, at policy `version`. Raises `JournalError`."""
        self._kept = {}
        oldest = version - self.max_staleness - self._settings.ahead  # that it began at: its tokens may be younger
        for group, calls in read_trained_groups(journal, last_step=step, oldest=oldest):
            last = max((call.step for call in calls), default=0)
            if last and left_out(group, algorithm) is None:
                advantages = [abs(call.advantage) for call in calls if call.step == last]
                self._note(group, _mean(advantages), len({call.step for call in calls}))

    def metrics(self, replayed: Sequence[ReplayGroup], version: int) -> dict[str, float]:
        """What a step that started at `version` replayed, as numbers to log."""
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
    """The groups of a step in the order in which they are split into minibatches: replayed ones spread evenly among
    the fresh ones that train, of which one is first; behind them those that are left out."""
    if not replayed:
        return tuple(fresh)
    training = [group for group in fresh if left_out(group, algorithm) is None]
    rest = [group for group in fresh if left_out(group, algorithm) is not None]
    places = [(number / len(training), group) for number, group in enumerate(training)]
    places += [((number + 0.5) / len(replayed), group) for number, group in enumerate(replayed)]
    return (*(group for _, group in sorted(places, key=lambda place: place[0])), *rest)


def probe(groups: Sequence[Group], version: int) -> tuple[Experience, ...]:
    """The sequences of one fresh group, to compare with the engine in a step that may train on older ones alone; empty
    if no token is of this policy version (rollouts that run ahead)."""
    for group in groups:
        found = [one for rollout in group.scored if whole_support(rollout) for one in merge(rollout)]
        if any((one.versions_T[one.loss_mask_T] == version).any() for one in found):
            return tuple(found)
    return ()


def _signals(batches: Iterable[Batch]) -> Mapping[str, float]:
    """For each group its mean absolute advantage over the calls that carried loss."""
    found: dict[str, list[float]] = {}
    for batch in batches:
        for experience in batch.experiences:
            mask_T = experience.loss_mask_T
            _, firsts = np.unique(experience.calls_T[mask_T], return_index=True)
            advantages = experience.advantages_T[mask_T][firsts].tolist()
            found.setdefault(experience.group_id, []).extend(map(abs, advantages))
    return {group_id: _mean(advantages) for group_id, advantages in found.items()}


def _mean(values: Sequence[float]) -> float:
    """Exactly rounded, so that it does not depend on the order."""
    return math.fsum(values) / len(values) if values else 0.0


def _refuse_idle(settings: SamplingConfig) -> None:
    default = SamplingConfig()
    for name in ("replay_priority", "max_staleness"):
        if (value := getattr(settings, name)) != getattr(default, name):
            raise ConfigError(
                f"sampling.{name} is {value!r}, but without replay no group is ever stale: set sampling.replay_share "
                "too, or leave it out"
            )


def _refuse_on_policy(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise `ConfigError` for algorithms that older groups would train in a wrong direction."""
    name = config.algorithm.algorithm_type
    if algorithm.needs_critic:
        raise ConfigError(
            f"sampling.replay_share has no place with the critic of {name!r}: returns in replayed rollouts are those "
            "of an older policy, and the ratio of a token does not correct what came after it; set it to 0, or "
            "loss.advantage to one without a critic (grpo, rloo)"
        )
    if algorithm.needs_teacher:
        raise ConfigError(
            f"sampling.replay_share has no place in {name!r}, where a teacher scores what the policy itself says now: "
            "set it to 0"
        )
    if not algorithm.off_policy:
        raise ConfigError(
            f"sampling.replay_share needs a policy loss that corrects for older policies, but "
            f"{algorithm.policy_loss!r} of {name!r} has no probability ratio and would be biased: set it to 0, or "
            "loss.policy_loss to one that does (ppo, importance_sampling, topr, opmd)"
        )
