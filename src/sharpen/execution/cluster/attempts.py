"""Where attempts run when execution is `ray`: in rollout workers, which may crash, hang, or be lost with their machine.

In: `AttemptRequest`, from the runner's retries and groups. Out: `Attempt`. What ran on a worker that died is done
again, with the same noise: nothing of it was recorded. The worker that a task brings down took others with it, and
which of them did it cannot be told from outside; so what was there runs again beside fewer and fewer others, in the end
alone. Who brings a worker down alone has failed for itself, and that counts.
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

from sharpen.config.run import RunConfig
from sharpen.errors import EngineLostError, RolloutError
from sharpen.execution.auxiliary.models import AuxiliaryMeters
from sharpen.execution.cluster.engine import first_line
from sharpen.rollout.attempt import Ending
from sharpen.rollout.in_process import Attempt, AttemptRequest
from sharpen.rollout.models import AUXILIARY
from sharpen.types import Outcome

log = logging.getLogger("sharpen.rollout")

CROWD_SHRINKS = 8
"""Each time its worker dies, a rollout runs again beside so many times fewer others."""
HARD_GRACE_S = 10.0
RESTART_S = 180.0
"""How long a run waits while no worker is there at all."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rollout worker: its actor, its machine, the crowds that its attempts allow, whether it serves, whether it is
    being emptied; how often it died, and how many attempts it had when it died last."""

    name: str
    actor: Any
    node: str
    limits: list[int] = field(default_factory=list)
    alive: bool = True
    draining: bool = False
    deaths: int = 0
    fallen: int = 0

    @property
    def load(self) -> int:
        """Attempts that it has."""
        return len(self.limits)


class AuxiliaryTotals(AuxiliaryMeters):
    """What all workers together have used of the auxiliary models."""

    def add(self, noticed: Mapping[str, float]) -> None:
        """Count what an attempt has used."""
        for name, meter in self._meters.items():
            meter.add(int(noticed.get(f"{AUXILIARY}{name}/tokens", 0)))

    def check(self) -> None:
        """Raise `TokenCapError` once a model has used its tokens up."""
        for meter in self._meters.values():
            if (refusal := meter.refusal()) is not None:
                raise refusal


class OnWorkers:
    """Satisfies `rollout.in_process.AttemptRunner`. `setup` is a reference to the workers' `Setup`, `failed` gets an
    error when the engines are gone for good. `whole_groups` is the workflow's (see there). `grace_s`: how long after
    its time limit an attempt may be silent before its worker is asked whether it lives, and how long that may take to
    answer.

    All of it runs on the runner's loop, but for `close`.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        setup: Any,
        config: RunConfig,
        auxiliary: AuxiliaryTotals,
        failed: Future[Exception],
        grace_s: float = HARD_GRACE_S,
        *,
        whole_groups: bool = False,
    ) -> None:
        self._workers = workers
        self._setup = setup
        self._timeout_s = config.rollout.timeout_s
        self._most = config.cluster.rollouts_per_worker
        self._auxiliary = auxiliary
        self._failed = failed
        self._grace_s = grace_s
        self._failure: asyncio.Future[Exception] | None = None
        self._changed = asyncio.Event()
        self._reviving: set[asyncio.Task[None]] = set()
        self.whole_groups = whole_groups
        self.version = 0
        """What the engines serve; a worker that starts again is told."""

    async def run(self, request: AttemptRequest) -> Attempt:
        """See `AttemptRunner.run`. Raises `RolloutError` if no worker, `EngineLostError` if no engine can be had any
        more."""
        crowd = self._most
        while True:
            self._auxiliary.check()
            worker = await self._place(crowd)
            try:
                came = await self._on(worker, request)
            finally:
                worker.limits.remove(crowd)
                self._changed.set()
            if isinstance(came, Attempt):
                self._auxiliary.add(came.noticed)
                return came
            if came.alone and not await self._machine_is_lost(worker, came.node):
                ending = Ending(outcome=came.outcome, error=came.error)
                return Attempt(ending=ending, noticed={}, seconds=came.seconds, num_answers=None)
            crowd = max(1, crowd // CROWD_SHRINKS)

    def close(self) -> None:
        """Stop waiting for workers that died. The actors are their maker's to end."""
        if self._reviving:
            asyncio.run_coroutine_threadsafe(self._give_up(), self._reviving_loop).result()

    async def _give_up(self) -> None:
        for task in (tasks := list(self._reviving)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _place(self, crowd: int) -> Worker:
        """A worker with room for an attempt that shares it with fewer than `crowd` others. Where none has, one is
        drained for it; the others go on."""
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
                    raise RolloutError(f"no rollout worker could be started again within {RESTART_S:g} s")
                await self._change(5.0)
        finally:
            if drained is not None:
                drained.draining = False
                self._changed.set()

    async def _change(self, most_s: float) -> None:
        """Wait until something has changed with the workers, at most so long."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), most_s)

    async def _on(self, worker: Worker, request: AttemptRequest) -> Attempt | _LostAttempt:
        import ray
        from ray.exceptions import RayError, RayTaskError

        began, life, hung = time.monotonic(), worker.deaths, False
        reference = worker.actor.run.remote(request)
        call = asyncio.ensure_future(_awaited(reference))
        try:
            while not call.done():
                limit_s = self._grace_s + max(0.0, began + self._timeout_s - time.monotonic())
                await asyncio.wait({call, self._failing()}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if self._failing().done():
                    raise EngineLostError(str(self._failing().result()))
                if not call.done() and not hung and not await _answers(worker.actor, self.version, self._grace_s):
                    hung = True
                    ray.kill(worker.actor, no_restart=False)
            came: Attempt = call.result()
            return came
        except RayTaskError as error:  # bad input, or a defect of ours: as in one process
            raise error.cause from None
        except RayError as error:
            if worker.deaths == life:
                self._mourn(worker, error, hung=hung)
            return _LostAttempt.of(
                worker, error, hung=hung, timeout_s=self._timeout_s, seconds=time.monotonic() - began
            )
        finally:
            if not call.done():
                call.cancel()
                with contextlib.suppress(RayError):
                    ray.cancel(reference)

    def _failing(self) -> asyncio.Future[Exception]:
        if self._failure is None:
            self._failure = asyncio.wrap_future(self._failed)
        return self._failure

    def _mourn(self, worker: Worker, error: Exception, *, hung: bool) -> None:
        """Take a worker that died out of service, until it is there again."""
        worker.alive = False
        worker.deaths += 1
        worker.fallen = worker.load
        what = "did not answer and was killed" if hung else f"died ({first_line(error)})"
        log.warning("%s %s: its %d rollouts run again", worker.name, what, worker.load)
        task = asyncio.create_task(self._revive(worker))
        self._reviving_loop = asyncio.get_running_loop()
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)

    async def _revive(self, worker: Worker) -> None:
        """Wait until Ray has started the worker again, here or on another machine, and put it back into service."""
        from ray.exceptions import ActorDiedError, RayError

        while True:
            try:
                worker.node = await worker.actor.start.remote(self._setup, self.version)
                break
            except ActorDiedError as error:
                log.warning("%s cannot be started again: %s", worker.name, first_line(error))
                return
            except RayError:  # not yet
                await asyncio.sleep(0.5)
        worker.alive = True
        self._changed.set()

    async def _machine_is_lost(self, worker: Worker, node: str) -> bool:
        """Whether a worker died with its machine. Known once the worker runs again, or the machine is missed."""
        import ray

        until = time.monotonic() + RESTART_S
        while not worker.alive and time.monotonic() < until:
            if any(one["NodeID"] == node and not one["Alive"] for one in ray.nodes()):
                return True
            await self._change(1.0)
        return any(one["NodeID"] == node and not one["Alive"] for one in ray.nodes())


@dataclass(frozen=True, slots=True, kw_only=True)
class _LostAttempt:
    """An attempt that went down with its worker, `alone` or beside others."""

    alone: bool
    node: str
    outcome: Outcome
    error: str
    seconds: float

    @classmethod
    def of(cls, worker: Worker, error: Exception, *, hung: bool, timeout_s: float, seconds: float) -> _LostAttempt:
        outcome = Outcome.BLOCKED_LOOP if hung else Outcome.WORKFLOW_ERROR
        text = (
            f"held its process past the time limit of {timeout_s:g} s, which no signal could end: killed"
            if hung
            else f"its process died while nothing else ran there: {first_line(error)}"
        )
        return cls(alone=worker.fallen == 1, node=worker.node, outcome=outcome, error=text, seconds=seconds)


async def _awaited(reference: Any) -> Any:
    return await reference


async def _answers(actor: Any, version: int, within_s: float) -> bool:
    """Whether a worker's process gives a sign of life."""
    try:
        await asyncio.wait_for(_awaited(actor.serve.remote(version)), within_s)
    except TimeoutError:
        return False
    return True
