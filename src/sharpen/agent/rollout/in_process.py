"""Runs attempts in this process, on the user loop, under their time limit.

In: `AttemptRequest`, one attempt to make. Out: `Attempt`, its outcome and recorded calls. The runner decides which
attempts to make, and retries after failures. The room `placement` has others: processes here, and actors of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Never, Protocol

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.models import RolloutModels
from sharpen.agent.rollout.places import describe, place_of_task, traceback_of
from sharpen.agent.rollout.retries import Ending
from sharpen.agent.rollout.user_loop import (
    GRACE_S,
    WATCH_EVERY_S,
    LoopAbandonedError,
    LoopBlockedError,
    Run,
    UserLoop,
    context_of,
)
from sharpen.errors import ConfigError, EngineLostError
from sharpen.types import Call, Mode, Outcome, Task

log = logging.getLogger("sharpen.rollout")

OpenModels = Callable[[str, int], RolloutModels]
"""(rollout id, 64-bit noise seed) -> the models."""
Opener = OpenModels | Mode
"""How an attempt gets its models: from a function of this process, or, in another process, by the mode's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRequest:
    """One attempt to make. `noise_seed` is the key of all noise that its calls sample with.

    If the workflow makes whole groups, the attempt makes `group_size` rollouts, and `rollout_id` is the first one's.
    """

    task: Task
    rollout_id: str
    noise_seed: int
    opener: Opener
    group_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A finished attempt: how it ended, its recorded calls, the counts of its models, when it `started` (seconds since
    1970) and its duration.

    `num_answers` counts the answers that the agent received, recorded or not; None if unknown. `beside` are the
    parts of a divided attempt that answer other questions, by the question's name (see `runner`).
    """

    ending: Ending
    calls: tuple[Call, ...] = ()
    counts: Mapping[str, float]
    seconds: float
    started: float | None = None
    num_answers: int | None = 0
    beside: Mapping[str, Attempt] = field(default_factory=dict)


class AttemptRunner(Protocol):
    """Runs attempts, many at a time."""

    async def run(self, request: AttemptRequest) -> Attempt:
        """Make one attempt. Cancelling the awaiting task cancels it.

        Raises only for bad input, and for errors that would fail every further attempt.
        """

    def close(self) -> None:
        """End all attempts. From another thread than that of `run`, whose loop must still run."""


class InProcess:
    """Runs attempts on a user loop of this process; `timeout_s` is the time limit of each."""

    def __init__(self, functions: UserFunctions, timeout_s: float) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._users = UserLoop()
        self._warned_ignored = False

    async def run(self, request: AttemptRequest) -> Attempt:
        """See `AttemptRunner.run`. On any one event loop."""
        began = time.monotonic()
        run = Run(request.rollout_id, self._timeout_s)
        models = open_models(request, run)
        if isinstance(models, Attempt):
            return models
        if request.group_size > 1:
            models.policy.allow(request.group_size)
        code = functools.partial(self._functions.attempt, request.task, models, request.group_size)
        self._users.start(run, code)
        try:
            ending = await self._supervise(run, models)
        finally:
            if not run.future.done():
                self._users.cancel(run)
            models.end()
        return attempt_of(models, ending, run.started.result() if run.started.done() else began)

    def close(self) -> None:
        """End the user loop."""
        self._users.close()

    async def _supervise(self, run: Run, models: RolloutModels) -> Ending:
        """Wait for the run until its time limit, counted from its start; then revoke its models and cancel it."""
        changed = _change_event(run)
        while not (run.started.done() or run.future.done()):
            await changed.wait()
            changed.clear()
        timed_out: str | None = None
        if not run.future.done() and not await _wait_until(run, changed, run.started.result() + run.timeout_s):
            place = place_of_task(run.task)
            timed_out = f"no result within the time limit of {run.timeout_s:g} s" + (f" ({place})" if place else "")
            models.end()
            self._users.cancel(run)
            await self._wait_for_end(run, changed)
        error = run.future.exception() if run.future.done() else None
        if run.misuse is not None:
            return Ending(outcome=Outcome.WORKFLOW_ERROR, error=run.misuse)
        if isinstance(error, LoopBlockedError):
            return Ending(outcome=Outcome.BLOCKED_LOOP, error=str(error))
        if isinstance(error, LoopAbandonedError):
            return Ending(
                outcome=Outcome.INFRASTRUCTURE, error=f"interrupted: {error}", counts_as_attempt=not error.culprit_known
            )
        if timed_out is not None:
            return Ending(outcome=Outcome.TIMEOUT, error=timed_out)
        if isinstance(error, asyncio.CancelledError):
            return Ending(outcome=Outcome.CANCELLED, error="the user loop was closed")
        if error is not None:
            assert isinstance(error, Exception)
            raise error
        ending: Ending = run.future.result()
        return ending

    async def _wait_for_end(self, run: Run, changed: asyncio.Event) -> None:
        """Wait for a cancelled run to end, at most for its grace period. While the loop is blocked, keep waiting: the
        watchdog finds the culprit."""
        while not await _wait_until(run, changed, time.monotonic() + GRACE_S):
            if not self._users.is_blocked():
                if not self._warned_ignored:
                    self._warned_ignored = True
                    log.warning(
                        "rollout %s ignores its cancellation (time limit): it is left running, the others continue",
                        run.label,
                    )
                return
            await asyncio.sleep(WATCH_EVERY_S)


def open_models(request: AttemptRequest, run: Run) -> RolloutModels | Attempt:
    """Open an attempt's models, which belong to the run; a failed attempt if that fails. Raises what would fail every
    rollout."""
    assert callable(request.opener)
    began = time.monotonic()
    try:  # in the run's context, so that sessions know their owner
        return context_of(run).run(request.opener, request.rollout_id, request.noise_seed)
    except (ConfigError, EngineLostError):
        raise
    except Exception as error:  # the failure boundary of the serving side
        ending = Ending(outcome=Outcome.INFRASTRUCTURE, error=describe(error), traceback=traceback_of(error))
        return Attempt(ending=ending, counts={}, seconds=time.monotonic() - began)


def attempt_of(models: RolloutModels, ending: Ending, began: float) -> Attempt:
    """Return a finished attempt, with what its models recorded. `began` is a time of `time.monotonic`. Raises the error
    of a model whose tokens are used up."""
    calls, counts, num_answers = models.end(), models.counts, models.policy.num_answers
    if models.exhausted is not None:
        raise models.exhausted
    seconds = time.monotonic() - began
    started = time.time() - seconds
    return Attempt(ending=ending, calls=calls, counts=counts, seconds=seconds, started=started, num_answers=num_answers)


def _change_event(run: Run) -> asyncio.Event:
    """Return an event of the running loop that is set when the run starts and when it ends."""
    changed, loop = asyncio.Event(), asyncio.get_running_loop()

    def notify(_: Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    run.started.add_done_callback(notify)
    run.future.add_done_callback(notify)
    return changed


async def _wait_until(run: Run, changed: asyncio.Event, deadline: float) -> bool:
    """Wait until the run has ended or the deadline (monotonic seconds) has passed. Return whether it has ended."""
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            while not run.future.done():
                changed.clear()
                if not run.future.done():
                    await changed.wait()
    except TimeoutError:
        pass
    return run.future.done()


# Keeps user code in the run's own process from ending that process without a word.
#
# In: nothing. Out: within the block, `os._exit` raises `SystemExit`, which costs one attempt, like `sys.exit`. A
# process that was forked ends as ever. Code in C can still end the process: `rollout.isolation: process` is for that.

_leave = os._exit
_lock = threading.Lock()
_open: Counter[int] = Counter()
"""How many blocks are open, by process: two runs of one process may overlap, and end in any order."""


@contextlib.contextmanager
def no_silent_exit() -> Iterator[None]:
    """Let `os._exit` raise `SystemExit` in this process."""
    process = os.getpid()
    with _lock:
        _open[process] += 1
        os._exit = _refuse
    try:
        yield
    finally:
        with _lock:
            _open[process] -= 1
            if not _open[process] and os._exit is _refuse:
                os._exit = _leave


def _refuse(status: int) -> Never:
    if not _open[os.getpid()]:
        _leave(status)
    raise SystemExit(
        f"os._exit({status}) would have ended the whole run, not this attempt alone; code that must end its "
        "process needs one of its own (rollout.isolation: process)"
    )
