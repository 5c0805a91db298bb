"""Runs attempts in rollout workers of Ray, which may crash, hang, or be lost with their machine.

In: `AttemptRequest`, from the runner's retries and groups. Out: `Attempt`. An attempt on a worker that died runs again
with the same noise, since none of it was recorded. Which of a worker's attempts killed it cannot be told from outside,
so all of them run again next to fewer and fewer others, at last alone. An attempt that kills its worker while it is
alone has failed, and this counts as its outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sharpen.agent.rollout.in_process import Attempt, AttemptRequest
from sharpen.agent.rollout.models import AUXILIARY
from sharpen.agent.rollout.retries import Ending
from sharpen.errors import EngineLostError, RolloutError
from sharpen.placement.auxiliary.models import AuxiliaryMeters
from sharpen.placement.cluster.engine import first_line
from sharpen.placement.place import HARD_GRACE_S, died_ending, held_ending

log = logging.getLogger("sharpen.rollout")

CROWD_DIVISOR = 8
"""Each time its worker dies, an attempt's crowd limit is divided by this number."""
RESTART_S = 180.0
"""Seconds to wait while no worker is alive."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rollout worker: its actor, its machine (`node`), the crowd limits of its attempts, and how often it died.
    `draining`: it takes no attempts but the one it is emptied for. `load_at_death`: its attempts when it last died."""

    name: str
    actor: Any
    node: str
    limits: list[int] = field(default_factory=list)
    alive: bool = True
    draining: bool = False
    deaths: int = 0
    load_at_death: int = 0

    @property
    def load(self) -> int:
        """Number of attempts that run on it."""
        return len(self.limits)


class AuxiliaryTotals(AuxiliaryMeters):
    """The tokens used of each auxiliary model, over all workers."""

    def add(self, counts: Mapping[str, float]) -> None:
        """Add the tokens of an attempt."""
        for name, meter in self._meters.items():
            meter.add(int(counts.get(f"{AUXILIARY}{name}/tokens", 0)))

    def check(self) -> None:
        """Raise `TokenCapError` once a model's tokens are used up."""
        for meter in self._meters.values():
            if (refusal := meter.refusal()) is not None:
                raise refusal


class OnWorkers:
    """Satisfies `rollout.in_process.AttemptRunner`. `setup` is a reference to the workers' `Setup`; `failed` receives
    an error when the engines are gone for good. A worker runs at most `most` attempts at a time. One whose attempt has
    not ended `grace_s` seconds after its time limit is asked for a sign of life, and must answer within `grace_s`.

    Everything except `close` runs on the runner's loop.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        setup: Any,
        auxiliary: AuxiliaryTotals,
        failed: Future[Exception],
        *,
        timeout_s: float,
        most: int,
        grace_s: float = HARD_GRACE_S,
    ) -> None:
        self._workers = workers
        self._setup = setup
        self._timeout_s = timeout_s
        self._most = most
        self._auxiliary = auxiliary
        self._failed = failed
        self._grace_s = grace_s
        self._failure: asyncio.Future[Exception] | None = None
        self._changed = asyncio.Event()
        self._reviving: set[asyncio.Task[None]] = set()
        self.version = 0
        """The version that the engines serve, passed to a restarted worker."""

    async def run(self, request: AttemptRequest) -> Attempt:
        """See `AttemptRunner.run`. Raises `RolloutError` if no worker can be restarted, `EngineLostError` if no engine
        can."""
        crowd = self._most
        while True:
            self._auxiliary.check()
            worker = await self._reserve_worker(crowd)
            try:
                result = await self._run_on(worker, request)
            finally:
                worker.limits.remove(crowd)
                self._changed.set()
            if isinstance(result, Attempt):
                self._auxiliary.add(result.counts)
                return result
            if result.alone and not await self._machine_is_lost(worker, result.node):
                started, seconds = time.time() - result.seconds, result.seconds
                return Attempt(ending=result.ending, counts={}, seconds=seconds, started=started, num_answers=None)
            crowd = max(1, crowd // CROWD_DIVISOR)

    def close(self) -> None:
        """Stop waiting for workers that died. Does not end the actors."""
        if self._reviving:
            asyncio.run_coroutine_threadsafe(self._cancel_revivals(), self._reviving_loop).result()

    async def _cancel_revivals(self) -> None:
        for task in (tasks := list(self._reviving)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reserve_worker(self, crowd: int) -> Worker:
        """Wait for a worker on which at most `crowd` attempts run, this one included, and reserve a place there. If
        none is free, one worker is drained for it."""
        drained: Worker | None = None
        served = time.monotonic()
        try:
            while True:
                alive = [worker for worker in self._workers if worker.alive]
                open_ = [worker for worker in alive if not worker.draining or worker is drained]
                fitting = [worker for worker in open_ if worker.load < min([crowd, self._most, *worker.limits])]
                if fitting:
                    worker = min(fitting, key=lambda one: one.load)
                    worker.limits.append(crowd)
                    return worker
                if crowd < self._most and open_ and (drained is None or not drained.alive):
                    drained = min(open_, key=lambda one: one.load)
                    drained.draining = True
                if alive:
                    served = time.monotonic()
                elif time.monotonic() - served > RESTART_S:
                    raise RolloutError(f"no rollout worker could be restarted within {RESTART_S:g} s")
                await self._change(5.0)
        finally:
            if drained is not None:
                drained.draining = False
                self._changed.set()

    async def _change(self, most_s: float) -> None:
        """Wait until the state of a worker changes, at most `most_s` seconds."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), most_s)

    async def _run_on(self, worker: Worker, request: AttemptRequest) -> Attempt | _LostAttempt:
        import ray
        from ray.exceptions import RayError, RayTaskError

        began, deaths, hung = time.monotonic(), worker.deaths, False
        reference = worker.actor.run.remote(request)
        call = asyncio.ensure_future(_await(reference))
        try:
            while not call.done():
                limit_s = self._grace_s + max(0.0, began + self._timeout_s - time.monotonic())
                await asyncio.wait({call, self._engine_failure()}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if self._engine_failure().done():
                    raise EngineLostError(str(self._engine_failure().result()))
                if not call.done() and not hung and not await _answers(worker.actor, self.version, self._grace_s):
                    hung = True
                    ray.kill(worker.actor, no_restart=False)
            result: Attempt = call.result()
            return result
        except RayTaskError as error:  # bad input or a bug: raised as in one process
            raise error.cause from None
        except RayError as error:
            if worker.deaths == deaths:
                self._retire(worker, error, hung=hung)
            return _LostAttempt.of(
                worker, error, hung=hung, timeout_s=self._timeout_s, seconds=time.monotonic() - began
            )
        finally:
            if not call.done():
                call.cancel()
                with contextlib.suppress(RayError):
                    ray.cancel(reference)

    def _engine_failure(self) -> asyncio.Future[Exception]:
        if self._failure is None:
            self._failure = asyncio.wrap_future(self._failed)
        return self._failure

    def _retire(self, worker: Worker, error: Exception, *, hung: bool) -> None:
        """Take a dead worker out of service and start waiting for its restart."""
        worker.alive = False
        worker.deaths += 1
        worker.load_at_death = worker.load
        cause = "did not answer and was killed" if hung else f"died ({first_line(error)})"
        log.warning("%s %s: its %d rollouts run again", worker.name, cause, worker.load)
        task = asyncio.create_task(self._revive(worker))
        self._reviving_loop = asyncio.get_running_loop()
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)

    async def _revive(self, worker: Worker) -> None:
        """Wait until Ray has restarted the worker, on any machine, and put it back into service."""
        from ray.exceptions import ActorDiedError, RayError

        while True:
            try:
                worker.node = await worker.actor.start.remote(self._setup, self.version)
                break
            except ActorDiedError as error:
                log.warning("%s cannot be restarted: %s", worker.name, first_line(error))
                return
            except RayError:  # not yet
                await asyncio.sleep(0.5)
        worker.alive = True
        self._changed.set()

    async def _machine_is_lost(self, worker: Worker, node: str) -> bool:
        """Whether a worker died with its machine. Waits until the worker runs again or Ray reports the machine dead."""
        import ray

        until = time.monotonic() + RESTART_S
        while not worker.alive and time.monotonic() < until:
            if any(one["NodeID"] == node and not one["Alive"] for one in ray.nodes()):
                return True
            await self._change(1.0)
        return any(one["NodeID"] == node and not one["Alive"] for one in ray.nodes())


@dataclass(frozen=True, slots=True, kw_only=True)
class _LostAttempt:
    """An attempt whose worker died; `alone` if no other attempt ran there."""

    alone: bool
    node: str
    ending: Ending
    seconds: float

    @classmethod
    def of(cls, worker: Worker, error: Exception, *, hung: bool, timeout_s: float, seconds: float) -> _LostAttempt:
        died = died_ending(f"died while nothing else ran there: {first_line(error)}")
        ending = held_ending(timeout_s) if hung else died
        return cls(alone=worker.load_at_death == 1, node=worker.node, ending=ending, seconds=seconds)


async def _await(reference: Any) -> Any:
    return await reference


async def _answers(actor: Any, version: int, within_s: float) -> bool:
    """Whether a worker's process answers in time."""
    try:
        await asyncio.wait_for(_await(actor.serve.remote(version)), within_s)
    except TimeoutError:
        return False
    return True
