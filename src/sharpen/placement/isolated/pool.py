"""Runs attempts in worker processes of this machine: a crash, a hang or too much memory costs one attempt.

In: `AttemptRequest`. Out: `Attempt`, with the calls that the gateway of this process recorded. One process makes one
attempt at a time, so that it is known whose a crash is (but for that of a thread which an earlier attempt of the same
process has left). Processes start when they are needed and stay: the next attempt
finds the user's modules imported. One whose attempt did not end by itself is ended, with all that came from it.

    runner ─► pool ─Order─► worker process: user loop, workflow, judge
                ▲                │ calls, by HTTP           │ questions
                └─ calls ◄── gateway ◄──────────────────────┘
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping

import cloudpickle

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import Attempt, AttemptRequest, attempt_of, open_models
from sharpen.agent.rollout.models import Access, RolloutModels
from sharpen.agent.rollout.places import describe
from sharpen.agent.rollout.retries import Ending
from sharpen.agent.rollout.user_loop import Run
from sharpen.config.run import RolloutConfig
from sharpen.errors import ConfigError, DatasetError, EngineLostError, RolloutError, TokenCapError
from sharpen.machine import num_cores
from sharpen.placement.isolated.messages import POLICY, Done, Failed, Logged, ModelCard, Order, Question, Ready, Start
from sharpen.placement.isolated.models import answer_of, card_of
from sharpen.placement.isolated.process import Died, WorkerProcess
from sharpen.placement.place import HARD_GRACE_S, died_ending, held_ending
from sharpen.placement.user_code import UserCode
from sharpen.types import Outcome

log = logging.getLogger("sharpen.rollout")

PER_CORE = 4
"""Processes for each core of this machine, unless the settings say how many."""
UNENDED = frozenset({Outcome.TIMEOUT, Outcome.BLOCKED_LOOP, Outcome.CANCELLED})
"""Outcomes of attempts whose code may still run."""
ENDS_RUN = (ConfigError, DatasetError, TokenCapError, EngineLostError)
"""Errors of a worker that would be those of every attempt."""
MAX_ONCE = 1000
"""Warnings that are remembered, since each process gives its own."""


class ProcessPool:
    """Satisfies `rollout.in_process.AttemptRunner`.

    A process whose attempt has not ended `grace_s` seconds after its time limit is ended. Everything except `close`
    runs on the runner's loop. Raises `ConfigError` if the functions cannot be sent to another process.
    """

    def __init__(self, functions: UserFunctions, config: RolloutConfig, grace_s: float = HARD_GRACE_S) -> None:
        self._start = Start(code=UserCode.of(functions, cloudpickle), timeout_s=config.timeout_s)
        self._config = config
        self._grace_s = grace_s
        self._slots = asyncio.Semaphore(num_processes(config))
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._open: dict[int, RolloutModels] = {}
        self._numbers = itertools.count()
        self._once: set[tuple[str, str]] = set()
        self._has_started = False

    async def run(self, request: AttemptRequest) -> Attempt:
        """See `AttemptRunner.run`. Raises `RolloutError` if no process can be started."""
        async with self._slots:
            worker = await self._worker()
            if isinstance(worker, Ending):
                return Attempt(ending=worker, counts={}, seconds=0.0)
            try:
                attempt = await self._run_on(worker, request)
            except BaseException:
                worker.end("the attempt was cancelled")
                raise
            if not worker.alive or attempt.ending.outcome in UNENDED:
                worker.end("the attempt did not end by itself")
            else:
                self._idle.append(worker)
            return attempt

    def close(self) -> None:
        """End all processes."""
        workers = list(self._all)
        for worker in workers:
            worker.end("the end of the run")
        for worker in workers:
            worker.join()

    async def _worker(self) -> WorkerProcess | Ending:
        """Return an idle process, or start one. An ending if it cannot be started although others could."""
        while self._idle:
            if (worker := self._idle.pop()).alive:
                return worker
        self._all = {worker for worker in self._all if not worker.ended}
        worker = WorkerProcess(self._start, self._config.memory_mb, self._answer, self._log)
        self._all.add(worker)
        try:
            found = await worker.ready()
        except BaseException:
            worker.end("the attempt was cancelled")
            raise
        if isinstance(found, Ready):
            self._has_started = True
            return worker
        worker.end("it did not start")
        if isinstance(found, Failed):
            raise found.error
        problem = f"a worker process {found.reason} while it started: {found.words or 'it said nothing'}"
        if not self._has_started:
            raise RolloutError(problem)
        return Ending(outcome=Outcome.INFRASTRUCTURE, error=problem)

    async def _run_on(self, worker: WorkerProcess, request: AttemptRequest) -> Attempt:
        began = time.monotonic()
        run = Run(request.rollout_id, self._config.timeout_s)
        models = open_models(request, run)
        if isinstance(models, Attempt):
            return models
        number = next(self._numbers)
        self._open[number] = models
        try:
            order = Order(
                number=number,
                task=request.task,
                rollout_id=request.rollout_id,
                noise_seed=request.noise_seed,
                group_size=request.group_size,
                cards=await asyncio.to_thread(_cards, models),
            )
            found = await worker.run(order, self._config.timeout_s + self._grace_s)
        finally:
            self._open.pop(number, None)
            models.end()
        if isinstance(found, Failed) and isinstance(found.error, ENDS_RUN):
            raise found.error
        if run.misuse is not None:
            ending = Ending(outcome=Outcome.WORKFLOW_ERROR, error=run.misuse)
        elif isinstance(found, Failed):  # e.g. an error of ours for want of memory: what it did is not known
            worker.end("its attempt could not be read")
            ending = died_ending(f"gave no result that can be read: {describe(found.error)}")
        elif found is None:
            ending = held_ending(self._config.timeout_s)
        elif isinstance(found, Died):
            ending = died_ending(found.reason, found.words)
        else:
            assert isinstance(found, Done)
            ending, began = found.attempt.ending, time.monotonic() - found.attempt.seconds
        return attempt_of(models, ending, began)

    def _answer(self, question: Question) -> object:
        """Answer a worker. On the thread that reads its messages."""
        models = self._open.get(question.attempt)
        if models is None:
            raise ConnectionError("the rollout has ended")
        return answer_of(_accesses(models)[question.model], question.what, question.arguments)

    def _log(self, logged: Logged) -> None:
        """Log what a worker logged; a warning of ours once, as one process would."""
        key = (logged.name, logged.text)
        if logged.name.startswith("sharpen.") and logged.name != "sharpen.workflow":
            if key in self._once:
                return
            if len(self._once) < MAX_ONCE:
                self._once.add(key)
        logging.getLogger(logged.name).log(logged.level, "%s", logged.text)


def num_processes(config: RolloutConfig) -> int:
    """Return how many processes there are at most."""
    return min(config.num_processes or PER_CORE * num_cores(), config.max_concurrent_rollouts)


def _accesses(models: RolloutModels) -> Mapping[str, Access]:
    return {POLICY: models.policy, **models.auxiliary}


def _cards(models: RolloutModels) -> dict[str, ModelCard]:
    return {name: card_of(access) for name, access in _accesses(models).items()}
