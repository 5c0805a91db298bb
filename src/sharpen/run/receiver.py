"""The trainer's half of a run in two processes: batches that an explorer rolled out, weights published for it.

In: the run's exchange. Out: the groups of each step, in order. A batch is trained only if the weights that sampled it
led to those of today: what an explorer sampled by weights that a crash took back is removed, and rolled out again (or
made again, of other sessions, by a server that learns).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sharpen.agent.rollout.refill import StepRollouts
from sharpen.config.run import RunConfig
from sharpen.learning.schedule import Schedule
from sharpen.models.identity import Identity
from sharpen.placement.exchange.announcement import Announcement
from sharpen.placement.exchange.batch import ExploredBatch
from sharpen.placement.exchange.store import Batches, Store, open_store
from sharpen.placement.exchange.weights import WeightPublisher
from sharpen.show.monitor.display import Display
from sharpen.types import Experience

if TYPE_CHECKING:
    from sharpen.placement.trainers import AnyTrainer

LOOK_S = 0.2
"""How often a side that waits for the other looks whether there is something new."""
REMIND_S = 60.0
"""How often it says that it waits."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    """Where a trainer finds the batches of its explorer, and leaves its weights."""

    store: Store
    announcement: Announcement


def open_inbox(config: RunConfig, run_dir: Path, model: Identity, say: Callable[[str], None]) -> Inbox:
    """Wait for the explorer of this run. Raises `ConfigError` if it does another run."""
    store = open_store(config.exchange, run_dir, f"{config.project}/{config.name}")
    content = wait_for(
        lambda: Batches(store).get(0), f"the explorer of {config.name!r} (sharpen run with mode explore)", say
    )
    announcement = Announcement.from_bytes(content)
    announcement.check(config, model)
    return Inbox(store=store, announcement=announcement)


class Receiver:
    """Satisfies `run.rollouts.Supply`: takes what an explorer in another process rolled out."""

    def __init__(
        self, inbox: Inbox, schedule: Schedule, *, total_steps: int, display: Display, trainer: AnyTrainer, trained: int
    ) -> None:
        """Publish the trainer's weights, which `trained` steps led to."""
        self.schedule = schedule
        self._store, self._batches = inbox.store, Batches(inbox.store)
        self._total = total_steps
        self._display = display
        self._trained = trained
        self._publisher = WeightPublisher(inbox.store, step=trained, version=trainer.version)
        self._waited_s = self._sync_s = 0.0
        self._batch: ExploredBatch | None = None
        self._publish(trainer)

    def gather(self, trainer: AnyTrainer) -> StepRollouts:
        """Wait for the batch of the next step. Raises `JournalError` for one that cannot be read."""
        number, began = self._trained + 1, time.perf_counter()
        self._display.doing("waiting")
        while True:
            content = wait_for(
                lambda: self._batches.get(number), f"batch {number} of the explorer", self._display.message
            )
            batch = ExploredBatch.from_bytes(content)
            problem = self._problem(batch, trainer.version)
            if not problem:
                break
            again = "its sessions go back to the server" if batch.sessions else "it is rolled out again"
            self._display.message(f"batch {number} is refused, {again}: {problem}")
            self._batches.remove(number)
        self._display.doing("")
        self._batch, self._waited_s = batch, time.perf_counter() - began
        return batch.rollouts

    def settle(self, trainer: AnyTrainer) -> None:
        """The step has trained: publish its weights, if they are due."""
        self._trained += 1
        if self._trained % self.schedule.interval == 0 or self._trained == self._total:
            self._publish(trainer)
        else:
            self._publisher.trained(self._trained)

    def serve_latest(self, trainer: AnyTrainer) -> None:
        """Nothing is served here, and nothing evaluated."""

    def probe(self) -> tuple[Experience, ...]:
        """No engine is here to be asked; tokens of the trainer's own version are compared, where a batch has some."""
        return ()

    def position(self) -> tuple[dict[str, Any], list[list[int]]]:
        """The order of the tasks is the explorer's, which keeps it with its batches."""
        return {}, []

    def take_times(self) -> dict[str, float]:
        """Seconds of the last step; `rollout` and `generate` passed in the explorer's process."""
        assert self._batch is not None
        sync_s, self._sync_s = self._sync_s, 0.0
        return {
            "rollout": self._batch.rollouts.seconds,
            "generate": self._batch.generate_s,
            "wait": self._waited_s,
            "drain": 0.0,
            "idle": self._waited_s,
            "sync": sync_s,
        }

    @property
    def num_ahead(self) -> int:
        """Batches that lie ready beyond the one that trained last."""
        return sum(number > self._trained for number in self._batches.numbers())

    def close(self) -> None:
        """Let go of the exchange. What lies there stays."""
        self._store.close()

    def _problem(self, batch: ExploredBatch, version: int) -> str:
        for session, sampled_by in batch.sampled_by:
            if not self._publisher.note.leads_here(session, sampled_by):
                return f"it was sampled by weights (version {sampled_by}) that an interrupted session had trained"
        behind = version - batch.version
        if behind > self.schedule.max_staleness:
            return f"it is {behind} policy versions behind, sync.max_staleness allows {self.schedule.max_staleness}"
        return ""

    def _publish(self, trainer: AnyTrainer) -> None:
        began = time.perf_counter()
        self._publisher.publish(trainer.version, self._trained, trainer.state_tensors())
        self._sync_s += time.perf_counter() - began


def wait_for(look: Callable[[], T | None], what: str, say: Callable[[str], None]) -> T:
    """Return what `look` finds, once it finds something; `say` now and then that `what` is awaited."""
    began = reminded = time.monotonic()
    said = False
    while (found := look()) is None:
        now = time.monotonic()
        if not said or now - reminded >= REMIND_S:
            say(f"waiting for {what}" + (f" since {now - began:.0f} s: is it running?" if said else ""))
            said, reminded = True, now
        time.sleep(LOOK_S)
    return found
