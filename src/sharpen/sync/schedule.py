"""When weights move, and who may go on: the whole policy, as a function of how far everyone is.

In: a run's `sync` settings, and `Counters`. Out: the next `Action` of the coordinator. Pure: it knows neither clock nor
threads. The side that rolls out ("explorer" in the names of the styles) and the trainer both count their batches from
1; step `k` trains batch `k`, so that what a batch will be behind when it trains is known when it begins: nothing that
was rolled out is ever thrown away for its age.

The explorer stands at a *point* when it has begun `offset + k * interval` batches, k = 1, 2, ...; it goes on from there
when nothing is in flight any more, and

    fixed                 when the trainer has done `k * interval` steps, and their weights serve. The trainer waits as
                          well: it goes on from there when its weights serve
    dynamic_by_explorer   when the trainer's latest weights serve. It takes them between two steps; it never waits
    dynamic_by_trainer    at once, unless the trainer asks: after each `interval` steps that waits until it has its sync

and never before the weights that serve are new enough for the batches up to the next point. With `fully_async` nobody
stops: weights move after each `interval` steps, under the rollouts in flight, and a batch begins as soon as it is sure
to be young enough.

Sources: the styles are those of Trinity-RFT, arXiv 2505.17826; holding rollouts back by the age that they will have:
AReaL, arXiv 2505.24298, section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sharpen.config.run import RunConfig
from sharpen.config.sync import SyncStyle
from sharpen.errors import ConfigError

_UNBOUNDED = 1_000_000
"""Steps that an explorer in a process of its own may be ahead where nothing bounds it."""


class Action(StrEnum):
    """What the coordinator does next."""

    BEGIN = "begin"  # start rolling out the next batch
    SYNC = "sync"  # load the trainer's weights into the engine
    TRAIN = "train"  # train the oldest batch, which has been rolled out
    WAIT = "wait"  # until the oldest batch has been rolled out; if it has, until nothing is in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """How far everyone is: batches begun of those in `total`, steps trained, steps that the engine's weights have had.
    `ready`: the oldest batch that has not trained has been rolled out; `idle`: nothing that was begun is in flight."""

    total: int
    begun: int
    trained: int
    synced: int
    ready: bool
    idle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The policy of a run. `max_behind` bounds in steps how far the weights that a batch begins with may be behind
    those that it trains; `max_staleness` is the same bound in policy versions, and a step makes `updates` of them."""

    style: SyncStyle
    interval: int
    offset: int
    max_behind: int
    updates: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Schedule:
        """As configured. Raises `ConfigError` for settings that cannot hold, or have no effect."""
        sync, updates = config.sync, config.trainer.num_minibatches * config.trainer.epochs
        if config.mode != "both":
            return cls._of_two_processes(config, updates)
        if sync.style == "fully_async" and sync.offset:
            raise ConfigError(
                f"sync.offset is {sync.offset}, but with sync.style 'fully_async' nobody waits: leave it out, and "
                "bound how far rollouts run ahead with sync.max_staleness"
            )
        least = sync.offset + sync.interval - 1
        most = least if sync.style == "fixed" else least + sync.interval
        if sync.max_staleness is not None:
            _check_bound(config, least * updates)
            most = sync.max_staleness // updates
        return cls(style=sync.style, interval=sync.interval, offset=sync.offset, max_behind=most, updates=updates)

    @classmethod
    def _of_two_processes(cls, config: RunConfig, updates: int) -> Schedule:
        """The explorer takes the newest weights before each batch, and waits only for `sync.max_staleness`."""
        sync = config.sync
        if sync.style != "fixed" or sync.offset:
            raise ConfigError(
                f"sync.style is {sync.style!r} and sync.offset {sync.offset}, but mode is {config.mode!r}, where "
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
        """Policy versions that a token may be behind when it trains."""
        return self.max_behind * self.updates

    @property
    def overlaps(self) -> bool:
        """Whether rollouts ever run ahead of the trainer."""
        return self.max_behind > 0

    @property
    def drains(self) -> bool:
        """Whether rollouts in flight end before weights move."""
        return self.style != "fully_async"

    @property
    def line(self) -> str:
        """What a run that overlaps says when it begins."""
        return (
            f"rollouts run ahead of the training (sync.style {self.style}, interval {self.interval}, offset "
            f"{self.offset}): no token is more than {self.max_staleness} policy versions behind when it trains"
        )

    def next(self, now: Counters) -> Action:
        """The next action; to be asked again after each."""
        if now.begun >= now.total:  # nothing is left to begin: only the last weights are still to move
            if now.trained >= now.begun and now.synced < now.trained:
                return Action.SYNC
            return Action.TRAIN if now.ready else Action.WAIT
        if self._syncs(now):
            return Action.SYNC
        if self._may_begin(now):
            return Action.BEGIN
        held = self.style in ("fixed", "dynamic_by_trainer") and self._trainer_asks(now)
        if now.ready and not held:
            return Action.TRAIN
        assert not now.idle, f"nobody may go on: {self}, {now}"
        return Action.WAIT

    def _trainer_asks(self, now: Counters) -> bool:
        return now.trained > now.synced and now.trained % self.interval == 0

    def _at_point(self, now: Counters) -> bool:
        return now.begun > self.offset and (now.begun - self.offset) % self.interval == 0

    def _new_enough(self, now: Counters, batches: int) -> bool:
        """Whether the engine's weights do for so many batches more."""
        return now.begun + batches - 1 - now.synced <= self.max_behind

    def _syncs(self, now: Counters) -> bool:
        if self.style == "fully_async":
            return self._trainer_asks(now)
        if now.trained <= now.synced or not now.idle or not self._at_point(now):
            return False
        if self.style == "dynamic_by_trainer":
            return self._trainer_asks(now)
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
        return not (self.style == "dynamic_by_trainer" and self._trainer_asks(now))


def what_ages(config: RunConfig, schedule: Schedule) -> str:
    """The settings in force, with their values, by which the weights move away from those that sampled."""
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


def _check_bound(config: RunConfig, least: int) -> None:
    """Raise `ConfigError` for a bound that the schedule breaks, or never reaches."""
    sync = config.sync
    assert sync.max_staleness is not None
    said = f"sync.max_staleness is {sync.max_staleness}, but with style {sync.style!r}, interval {sync.interval}"
    if sync.offset:
        said += f", offset {sync.offset}"
    if config.trainer.num_minibatches * config.trainer.epochs > 1:
        said += f" and {config.trainer.num_minibatches * config.trainer.epochs} updates a step"
    if sync.max_staleness < least:
        raise ConfigError(f"{said} tokens are up to {least} versions behind: set at least {least}, or sync more often")
    if sync.style == "fixed" and sync.max_staleness > least:
        raise ConfigError(
            f"{said} no token is more than {least} versions behind, so that it has no effect: leave it out, or raise "
            "sync.offset"
        )
