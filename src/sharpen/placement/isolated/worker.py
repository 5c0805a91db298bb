"""A worker process: runs the attempts that the run orders, one after the other, as the run's own process would.

In: `Start`, then `Order`s and `Answer`s. Out: see `messages`. torch and transformers are not imported here, unless the
user's code does. A process that the user's code has forked never speaks for the worker: it ends when it tries to.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import threading
from concurrent.futures import Future
from typing import Any

from sharpen.agent.agentscope.console import silent_agents
from sharpen.agent.rollout.in_process import Attempt, AttemptRequest, InProcess
from sharpen.agent.rollout.places import describe
from sharpen.agent.rollout.retries import Ending
from sharpen.errors import ConfigError, DatasetError
from sharpen.placement.isolated.messages import (
    OUT_OF_MEMORY,
    Answer,
    Channel,
    Done,
    Failed,
    Logged,
    Order,
    Question,
    Ready,
    Start,
    sendable,
)
from sharpen.placement.isolated.models import models_of
from sharpen.types import Outcome


class Worker:
    """The process's side of the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._loop = asyncio.new_event_loop()

    def serve(self) -> None:
        """Work until the run closes the channel."""
        start: Start = self._channel.receive()
        logging.basicConfig(handlers=[_SentLog(self)], level=logging.INFO, format="%(message)s")  # the run has its own
        threading.excepthook = _end_without_memory
        try:
            functions = start.code.load()
        except ConfigError as error:
            self.send(Failed(sendable(error)))
            return
        attempts = InProcess(functions, start.timeout_s)
        threading.Thread(target=self._loop.run_forever, name="sharpen-rollouts", daemon=True).start()
        with silent_agents(), contextlib.suppress(EOFError, OSError):
            self.send(Ready())
            while True:
                message: Order | Answer = self._channel.receive()
                if isinstance(message, Order):
                    asyncio.run_coroutine_threadsafe(self._run(attempts, message), self._loop)
                else:
                    self._answers.pop(message.number).set_result(message)

    def send(self, message: Any) -> None:
        """Send a message to the run."""
        if os.getpid() != self._process:
            os._exit(1)
        self._channel.send(message)

    async def _run(self, attempts: InProcess, order: Order) -> None:
        def open_models(rollout_id: str, noise_seed: int) -> Any:
            return models_of(order.cards, functools.partial(self._ask, order.number))

        request = AttemptRequest(
            task=order.task,
            rollout_id=order.rollout_id,
            noise_seed=order.noise_seed,
            opener=open_models,
            group_size=order.group_size,
        )
        try:
            self._finish(await self._attempt(attempts, request))
        except MemoryError:  # what would be said of it needs memory too
            os._exit(OUT_OF_MEMORY)

    async def _attempt(self, attempts: InProcess, request: AttemptRequest) -> Done | Failed:
        try:
            attempt = await attempts.run(request)
        except MemoryError:
            raise
        except Exception as error:  # the run decides what it ends
            return Failed(sendable(error))
        refusal = None if attempt.ending.refusal is None else sendable(attempt.ending.refusal)
        assert isinstance(refusal, ConfigError | DatasetError | None)
        ending = dataclasses.replace(attempt.ending, refusal=refusal)
        return Done(dataclasses.replace(attempt, ending=ending, calls=()))

    def _finish(self, message: Done | Failed) -> None:
        try:
            self.send(message)
        except OSError:
            pass  # the run has ended
        except MemoryError:
            raise
        except Exception as error:  # what the user's code returned cannot be pickled
            ending = Ending(outcome=Outcome.WORKFLOW_ERROR, error=f"the result cannot be sent: {describe(error)}")
            self.send(Done(Attempt(ending=ending, counts={}, seconds=0.0)))

    def _ask(self, attempt: int, model: str, what: str, *arguments: Any) -> Any:
        """Ask the run, and wait for the answer. Raises the error that the run's own object raised, and
        `ConnectionError` for a rollout that has ended."""
        number = next(self._numbers)
        answered = self._answers[number] = Future[Any]()
        self.send(Question(number, attempt, model, what, arguments))
        answer: Answer = answered.result()
        if answer.error is not None:
            raise answer.error
        return answer.value


def _end_without_memory(found: threading.ExceptHookArgs) -> None:
    """End the process with a thread of it that found no more memory: the attempt may wait for that thread."""
    if issubclass(found.exc_type, MemoryError):
        os._exit(OUT_OF_MEMORY)
    threading.__excepthook__(found)


class _SentLog(logging.Handler):
    """What is logged here is logged by the run."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record as text."""
        try:
            self._worker.send(Logged(record.name, record.levelno, self.format(record)))
        except Exception:  # as handlers do
            self.handleError(record)


def main(file: int) -> None:
    """Serve on an inherited socket, and leave without waiting for what the user's code left running."""
    Worker(Channel(file)).serve()
    os._exit(0)
