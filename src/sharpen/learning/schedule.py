"""The schedule of rollouts, training and weight syncs, as a pure function of counters.

In: a run's `sync` settings, and `Counters`. Out: the next `Action` of the coordinator. There are no clocks or threads
here. The explorer (the side that rolls out) and the trainer both count batches from 1, and step `k` trains batch `k`.
The staleness that a batch will have when it is trained is therefore known before it begins, and no rollout is ever
discarded for its age.

The explorer reaches a *sync point* when it has begun `offset + k * interval` batches, k = 1, 2, ... It waits there
until no rollout is in flight and the loaded weights are new enough for all batches up to the next point. It also waits,
depending on the style:

    fixed                 until the trainer has done `k * interval` steps and their weights are loaded. The trainer
                          waits after these steps, too, until its weights are loaded
    dynamic_by_explorer   until the trainer's latest weights are loaded. The trainer never waits: weights are loaded
                          between two of its steps
    dynamic_by_trainer    only if the trainer has requested a sync. It does so after each `interval` steps, and waits
                          until its weights are loaded

With `fully_async` neither side waits for the other: weights are loaded after each `interval` steps, while rollouts are
in flight, and a batch begins as soon as it is certain to be fresh enough.

Sources: the styles are those of Trinity-RFT, arXiv 2505.17826; delaying rollouts by their future staleness is from
AReaL, arXiv 2505.24298, section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sharpen.config.sections import SyncConfig, SyncStyle
from sharpen.errors import ConfigError

_UNBOUNDED = 1_000_000
"""The bound, in steps, of an explorer in a separate process without `sync.max_staleness`."""


class Action(StrEnum):
    """The coordinator's next action."""

    BEGIN = "begin"  # start rolling out the next batch
    SYNC = "sync"  # load the trainer's weights into the engine
    TRAIN = "train"  # train the oldest batch, which has been rolled out
    WAIT = "wait"  # until the oldest batch has been rolled out; if it has, until no rollout is in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The progress of a run.

    Of `total` batches, `begun` have been started and `trained` trained. `synced` is the number of steps that the
    engine's weights include. `ready`: the oldest untrained batch has been rolled out. `idle`: no rollout is in flight.
    """

    total: int
    begun: int
    trained: int
    synced: int
    ready: bool
    idle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule of a run.

    `max_behind` is the maximum number of steps by which the weights a batch begins with may be behind the weights that
    it trains. `max_staleness` is the same bound in policy versions; a step makes `updates` of them.
    """

    style: SyncStyle
    interval: int
    offset: int
    max_behind: int
    updates: int = 1

    @classmethod
    def of(cls, sync: SyncConfig, *, mode: str, updates: int) -> Schedule:
        """Return the configured schedule. Raises `ConfigError` for settings that are impossible or have no effect."""
        if mode != "both":
            return cls._of_two_processes(sync, mode, updates)
        if sync.style == "fully_async" and sync.offset:
            raise ConfigError(
                f"sync.offset is {sync.offset}, but it has no effect with sync.style 'fully_async': leave it out, and "
                "bound how far rollouts run ahead with sync.max_staleness"
            )
        least = sync.offset + sync.interval - 1
        most = least if sync.style == "fixed" else least + sync.interval
        if sync.max_staleness is not None:
            _check_bound(sync, least * updates, updates)
            most = sync.max_staleness // updates
        return cls(style=sync.style, interval=sync.interval, offset=sync.offset, max_behind=most, updates=updates)

    @classmethod
    def _of_two_processes(cls, sync: SyncConfig, mode: str, updates: int) -> Schedule:
        """Return the schedule of an explorer in a separate process.

        It loads the newest weights before each batch, and waits only if `sync.max_staleness` requires it. Raises
        `ConfigError` as `of` does.
        """
        if sync.style != "fixed" or sync.offset:
            raise ConfigError(
                f"sync.style is {sync.style!r} and sync.offset {sync.offset}, but mode is {mode!r}, where "
                "explorer and trainer never wait for each other: leave both out; sync.interval says how often weights "
                "are published, sync.max_staleness how old a token may become"
            )
        behind = _UNBOUNDED
        if sync.max_staleness is not None:
            least = (sync.interval - 1) * updates
            if sync.max_staleness < least:
                raise ConfigError(
                    f"sync.max_staleness is {sync.max_staleness}, but weights are published every {sync.interval} "
                    f"steps, so that tokens are up to {least} versions behind: set at least {least}"
                )
            behind = sync.max_staleness // updates
        return cls(style="fully_async", interval=sync.interval, offset=0, max_behind=behind, updates=updates)

    @property
    def max_staleness(self) -> int:
        """The maximum number of policy versions that a token may be behind when it is trained."""
        return self.max_behind * self.updates

    @property
    def overlaps(self) -> bool:
        """Whether rollouts ever run ahead of the trainer."""
        return self.max_behind > 0

    @property
    def drains(self) -> bool:
        """Whether rollouts in flight must end before new weights are loaded."""
        return self.style != "fully_async"

    @property
    def line(self) -> str:
        """The message at the start of a run that overlaps."""
        return (
            f"rollouts run ahead of the training (sync.style {self.style}, interval {self.interval}, offset "
            f"{self.offset}): no token is more than {self.max_staleness} policy versions behind when it is trained"
        )

    def next(self, now: Counters) -> Action:
        """Return the next action. To be called again after each action."""
        if now.begun >= now.total:  # no batch is left to begin: only the last weights are still to be loaded
            if now.trained >= now.begun and now.synced < now.trained:
                return Action.SYNC
            return Action.TRAIN if now.ready else Action.WAIT
        if self._must_sync(now):
            return Action.SYNC
        if self._may_begin(now):
            return Action.BEGIN
        trainer_waits = self.style in ("fixed", "dynamic_by_trainer") and self._trainer_wants_sync(now)
        if now.ready and not trainer_waits:
            return Action.TRAIN
        assert not now.idle, f"deadlock: {self}, {now}"
        return Action.WAIT

    def _trainer_wants_sync(self, now: Counters) -> bool:
        return now.trained > now.synced and now.trained % self.interval == 0

    def _at_point(self, now: Counters) -> bool:
        return now.begun > self.offset and (now.begun - self.offset) % self.interval == 0

    def _new_enough(self, now: Counters, batches: int) -> bool:
        """Whether the engine's weights are new enough for the next `batches` batches."""
        return now.begun + batches - 1 - now.synced <= self.max_behind

    def _must_sync(self, now: Counters) -> bool:
        if self.style == "fully_async":
            return self._trainer_wants_sync(now)
        if now.trained <= now.synced or not now.idle or not self._at_point(now):
            return False
        if self.style == "dynamic_by_trainer":
            return self._trainer_wants_sync(now)
        if self.style == "fixed":
            return now.trained == now.begun - self.offset
        return now.begun + self.interval - 1 - now.trained <= self.max_behind

    def _may_begin(self, now: Counters) -> bool:
        if self.style == "fully_async":
            return self._new_enough(now, 1)
        if not self._at_point(now):
            return True
        if not now.idle or not self._new_enough(now, self.interval):
            return False
        if self.style == "dynamic_by_explorer":
            return now.synced >= now.trained
        return not (self.style == "dynamic_by_trainer" and self._trainer_wants_sync(now))


def _check_bound(sync: SyncConfig, least: int, updates: int) -> None:
    """Raise `ConfigError` for a `max_staleness` that the schedule exceeds or never reaches."""
    assert sync.max_staleness is not None
    settings = f"sync.max_staleness is {sync.max_staleness}, but with style {sync.style!r}, interval {sync.interval}"
    if sync.offset:
        settings += f", offset {sync.offset}"
    if updates > 1:
        settings += f" and {updates} updates a step"
    if sync.max_staleness < least:
        raise ConfigError(
            f"{settings} tokens are up to {least} versions behind: set at least {least}, or sync more often"
        )
    if sync.style == "fixed" and sync.max_staleness > least:
        raise ConfigError(
            f"{settings} no token is more than {least} versions behind, so that it has no effect: leave it out, or "
            "raise sync.offset"
        )
