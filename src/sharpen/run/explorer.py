"""The coordinator's side of the rollouts: starts batches, also ahead of the trainer, and syncs weights to the engine.

In: the order of the tasks, and a `Schedule` that chooses the next action. Out: for each step the groups of its batch
(`gather`), and an engine with the weights that the schedule asks for. It acts in the coordinator's thread, before and
after each training step; rollouts run on the runner's threads, also while the trainer computes.

    gather ─► (begin | sync | wait)* ─► the oldest batch ─► trained by `loop` ─► settle ─► gather ...

A synchronous run never starts a batch ahead.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sharpen.agent.operators.pipeline import ON_ROLLOUTS, Pipeline
from sharpen.agent.rollout.refill import StepRollouts, roll_out
from sharpen.agent.rollout.statistics import check_excluded
from sharpen.agent.tasks.order import Order, distinct
from sharpen.errors import EngineError, ParityError
from sharpen.learning.experience.draw import left_out
from sharpen.learning.recipe import RolloutRecipe
from sharpen.learning.schedule import Action, Counters
from sharpen.show.monitor.display import Display
from sharpen.types import Experience, Group, IntArray, Rollout, Task, id_of_group

if TYPE_CHECKING:
    from sharpen.placement.place import Serving
    from sharpen.placement.trainers import AnyTrainer


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """A batch, or a refill of one, whose rollouts were started: the places of its tasks in the order, the futures of
    its groups, when it started and when its last group ended (seconds)."""

    places: Sequence[int]
    futures: list[Future[Group]] = field(default_factory=list)
    began: float
    ended: float

    @property
    def landed(self) -> bool:
        return all(future.done() for future in self.futures)


class Explorer:
    """Rolls out the batches of a run. In a continued run `trained` steps are done, the engine serves `version`, and
    `drawn` are the tasks of batches that the earlier session started but did not train: they are rolled out again
    first."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        *,
        serving: Serving,
        tasks: Sequence[Task],
        order: Order,
        total_steps: int,
        display: Display,
        trained: int = 0,
        version: int = 0,
        drawn: Iterable[Sequence[int]] = (),
    ) -> None:
        self.tasks = tasks
        self.schedule = recipe.schedule
        self._total = total_steps
        self._config = recipe.config
        self._algorithm = recipe.algorithm
        self._operators = Pipeline.of(recipe.config.sampling.operators, ON_ROLLOUTS)
        self._serving = serving
        self._order = order
        self._display = display
        self._begun = self._trained = self._synced = trained
        self._version = version
        self._drawn = deque(drawn)
        self._flights: deque[_Flight] = deque()
        self._prompt_P: IntArray | None = None
        self._probe: Future[tuple[Experience, ...]] | None = None
        self._times: dict[str, float] = defaultdict(float)
        self._generated_s = serving.generating_s()

    def gather(self, trainer: AnyTrainer | None = None) -> StepRollouts:
        """Start the batches that may start, wait for the batch of the next step, and replace groups that cannot train
        by further tasks where refill is on. Ctrl-C cancels that batch."""
        self._generated_s = self._serving.generating_s()
        while (action := self.schedule.next(self._counters())) is not Action.TRAIN:
            if action is Action.BEGIN:
                self._begin()
            elif action is Action.SYNC:
                assert trainer is not None, "the schedule asks for weights of nobody"
                self._sync(trainer)
            else:
                self._wait()
        batch_size, share = self._config.algorithm.batch_size, self._config.rollout.max_excluded_share
        flight = self._flights[0]
        with self._timed_wait("wait"):
            rolled_out = roll_out(
                self._collect,
                lambda group: left_out(group, self._algorithm) is None,
                batch_size=batch_size,
                max_refill_tasks=self._algorithm.most_further(batch_size),
                check=lambda groups: check_excluded(groups, share),
            )
        self._flights.popleft()
        self._times["rollout"] += flight.ended - flight.began + rolled_out.refill_s
        return rolled_out

    def settle(self, trainer: AnyTrainer) -> None:
        """Note that the step has trained, and sync the weights if they are due."""
        self._trained += 1
        if self.schedule.next(self._counters()) is Action.SYNC:
            self._sync(trainer)

    def serve_latest(self, trainer: AnyTrainer) -> None:
        """Make the engine serve the trainer's weights, for an evaluation, after the rollouts in flight where the sync
        style drains them."""
        if trainer.version != self._version:
            while self.schedule.drains and not self._counters().idle:
                self._wait()
            self._sync(trainer)

    def probe(self) -> tuple[Experience, ...]:
        """Return the engine's calls after the last sync, to compare the trainer with; none if the trainer has newer
        weights. Raises `ParityError` if the engine failed with the new weights."""
        if self._probe is None or self._synced != self._trained:
            return ()
        try:
            return self._probe.result()
        except EngineError as error:
            raise ParityError(
                f"the engine does not answer with the weights of version {self._version}: {error}"
            ) from error

    def position(self) -> tuple[dict[str, Any], list[list[int]]]:
        """Return what a resumed run needs: the order's state, and the tasks of each started but untrained batch."""
        return self._order.state(), [*(list(flight.places) for flight in self._flights), *map(list, self._drawn)]

    def take_times(self) -> dict[str, float]:
        """Return seconds since the last call and reset them: `rollout`, from the start of the step's batch to its end;
        `wait`, for that batch; `drain`, for all rollouts in flight before a sync; `idle`, the part of `wait` and
        `drain` in which the engine had no request; `sync`, for moving weights. `generate` is the time since the start
        of the last `gather` in which the engine had a request."""
        times, self._times = self._times, defaultdict(float)
        times["generate"] = self._serving.generating_s() - self._generated_s
        return {name: times[name] for name in ("rollout", "generate", "wait", "drain", "idle", "sync")}

    @property
    def num_ahead(self) -> int:
        """Number of batches started beyond the one that trains next."""
        return max(0, self._begun - self._trained - 1)

    def close(self) -> None:
        """Cancel the rollouts in flight."""
        for flight in self._flights:
            for future in flight.futures:
                future.cancel()

    def _counters(self) -> Counters:
        return Counters(
            total=self._total,
            begun=self._begun,
            trained=self._trained,
            synced=self._synced,
            ready=bool(self._flights) and self._flights[0].landed,
            idle=all(flight.landed for flight in self._flights),
        )

    def _begin(self) -> None:
        places = self._drawn.popleft() if self._drawn else self._order.draw(self._config.algorithm.batch_size)
        self._begun += 1
        self._flights.append(self._launch(places, self._begun, ""))

    def _collect(self, count: int, refill_round: int) -> list[Group]:
        """Return the groups of the next step's batch, or those of `count` further tasks in a refill round, and report
        their rewards to the order."""
        flight = self._flights[0]
        if refill_round:
            flight = self._launch(self._order.draw(count), self._trained + 1, f"refill-{refill_round}/")
        groups = self._serving.runner.collect(flight.futures)
        operated = self._operated([part for group in groups for part in group.with_side])
        for place, group in zip(flight.places, groups, strict=True):
            rewards = [rollout.reward for rollout in group.scored if rollout.answered and rollout.reward is not None]
            if rewards:
                self._order.observe(place, fmean(rewards))
        self._choose_prompt(groups)
        return operated

    def _operated(self, groups: Sequence[Group]) -> list[Group]:
        """Apply the operators; the noise of auxiliary models that they ask is that of these groups."""
        if not (groups and self._operators.asks_models):
            return self._operators.on_groups(groups)
        with self._serving.auxiliary_models(f"operators/{groups[0].id}") as models:
            return self._operators.on_groups(groups, models)

    def _launch(self, places: Sequence[int], step: int, part: str) -> _Flight:
        """Start the groups of these tasks for training `step`, which counts from 1."""
        tasks = [self.tasks[place] for place in places]
        baseline = self._serving.modes["greedy"] if self._algorithm.needs_baseline else None
        total, done = len(tasks) * (self._config.algorithm.group_size + (baseline is not None)), 0
        flight = _Flight(places=places, began=(now := time.perf_counter()), ended=now)

        def note(_: Rollout) -> None:
            nonlocal done
            done += 1
            if step == self._trained + 1:
                self._display.rollouts(done, total)

        def landed(_: Future[Group]) -> None:
            flight.ended = time.perf_counter()

        ids = distinct([id_of_group(step, f"{part}{task.id}") for task in tasks])
        for task, id_ in zip(tasks, ids, strict=True):
            future = self._serving.runner.submit(task, id_, self._version, on_rollout=note, open_baseline=baseline)
            future.add_done_callback(landed)
            flight.futures.append(future)
        return flight

    def _wait(self) -> None:
        """Wait for the next step's batch or, if that has ended, for everything in flight."""
        landed = self._flights[0].landed
        flights = list(self._flights) if landed else [self._flights[0]]
        with self._timed_wait("drain" if landed else "wait"):
            concurrent.futures.wait([future for flight in flights for future in flight.futures])

    @contextlib.contextmanager
    def _timed_wait(self, name: str) -> Iterator[None]:
        began, generated_s = time.perf_counter(), self._serving.generating_s()
        yield
        seconds = time.perf_counter() - began
        self._times[name] += seconds
        self._times["idle"] += max(0.0, seconds - (self._serving.generating_s() - generated_s))

    def _sync(self, trainer: AnyTrainer) -> None:
        began = time.perf_counter()
        self._display.doing("syncing")
        if trainer.version != self._version:
            self._serving.publish(trainer.version, trainer.state_tensors())
            self._version = trainer.version
            if self.schedule.overlaps and self._prompt_P is not None:
                self._probe = self._serving.probe(
                    self._prompt_P, noise=self._version, temperature=self._config.model.temperature
                )
        self._synced = self._trained
        self._display.doing("")
        self._times["sync"] += time.perf_counter() - began

    def _choose_prompt(self, groups: Sequence[Group]) -> None:
        """Use the prompt of the run's first call for probes."""
        if self._prompt_P is None:
            calls = (call for group in groups for rollout in group.scored for call in rollout.calls)
            self._prompt_P = next((call.prompt_ids_P for call in calls), None)
