"""Where the user's code runs: a thread and an event loop of its own, which is watched, and replaced when it hangs.

In: coroutine functions. Out: their results, or an error that says who blocked the loop, and where.

    caller ──start()──► current loop thread ──► Run.future
                              ▲ heartbeat
                        watchdog thread: names what blocks; after the time limit abandons the loop and starts another

Code that blocks (say `time.sleep` in an `async def`) cannot be cancelled by anybody. Its thread is left behind (a
daemon: it cannot hold up the exit), its run ends with `LoopBlockedError`, the others that were on the loop with
`LoopAbandonedError`: they are innocent, and can be started again.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sharpen.rollout.places import imported_by, place_of_frame

log = logging.getLogger("sharpen.rollout")

T = TypeVar("T")
P = TypeVar("P")
GRACE_S = 0.5
"""How long a cancelled run may take to end."""
WATCH_EVERY_S = 0.1
"""How often the watchdog looks."""
WARN_AFTER_S = 1.0
"""A loop that is blocked for longer earns a warning."""

owner: contextvars.ContextVar[Run | None] = contextvars.ContextVar("sharpen_run", default=None)
"""The run that a piece of user code belongs to; tasks that it spawns inherit it."""

never_ended: list[LoopThread] = []
"""Closed loops whose tasks ignore their cancellation: kept, for a pending task must not be collected."""


class LoopBlockedError(RuntimeError):
    """This run's code blocked the loop for longer than its time limit."""


class LoopAbandonedError(RuntimeError):
    """Another run's code (named in the message) blocked the loop, which was abandoned with this run on it.

    `culprit_known`: that run was still supervised, and ended with `LoopBlockedError`.
    """

    def __init__(self, message: str, culprit_known: bool) -> None:
        super().__init__(message, culprit_known)
        self.culprit_known = culprit_known

    def __str__(self) -> str:
        return str(self.args[0])


class Run:
    """One piece of user code on the loop. `started` and `future` resolve from the loop's thread. `misuse`: why it
    fails, whatever its code makes of it, if it called another run's model, or another one called its own."""

    def __init__(self, label: str, timeout_s: float) -> None:
        self.label = label
        self.timeout_s = timeout_s
        self.started: Future[float] = Future()
        self.future: Future[Any] = Future()
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False
        self.misuse: str | None = None

    def fail(self, reason: str) -> None:
        """Let it fail; the first reason stays. From any thread."""
        self.misuse = self.misuse or reason

    def overdue(self, now: float) -> bool:
        """Whether its time limit, and the grace to end after it, have passed."""
        return self.started.done() and now > self.started.result() + self.timeout_s + GRACE_S / 2

    def resolve(self, *, result: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome, unless it has one."""
        try:
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
        except InvalidStateError:
            pass  # abandoned before, and ended after all


def context_of(run: Run) -> contextvars.Context:
    """A context in which code belongs to this run."""
    context = contextvars.copy_context()
    context.run(owner.set, run)
    return context


class DaemonThreads(ThreadPoolExecutor):
    """What `asyncio.to_thread` uses: a daemon thread for each piece of work.

    A pool's threads are waited for at exit, so that a workflow that never returns would keep the process alive; and a
    pool has few threads, so that blocking agents would run one after another.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # handed to whoever awaits the work
                future.set_exception(error)

        threading.Thread(target=work, name="sharpen-blocking-code", daemon=True).start()
        return future


class LoopThread:
    """One thread that runs one event loop, and who owns each task on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(DaemonThreads())
        self.loop.set_task_factory(self._make_task)
        self.runs: set[Run] = set()
        self.beat_pending = False
        self._owners: WeakKeyDictionary[asyncio.Task[Any], Run | None] = WeakKeyDictionary()
        self._stopping = False
        self.thread = threading.Thread(target=self._serve, name="sharpen-user-code", daemon=True)
        self.thread.start()

    def start(self, run: Run, code: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.runs.add(run)
        run.future.add_done_callback(lambda _: self.runs.discard(run))
        self.loop.call_soon_threadsafe(self._begin, run, code)

    def beat(self) -> None:
        """Ask the loop for a sign of life."""
        self.beat_pending = True
        self.loop.call_soon_threadsafe(self._answer)

    def doing(self) -> tuple[Any, Run | None, str | None]:
        """What the loop's thread is in right now: the task, its run, and the place; (None, None, None) when idle."""
        task = asyncio.current_task(self.loop)
        place = place_of_frame(sys._current_frames().get(self.thread.ident or 0), user_only=task is None)
        return task, self._owners.get(task) if task is not None else None, place

    def importing(self) -> str | None:
        """The module that the loop's thread is importing right now."""
        return imported_by(sys._current_frames().get(self.thread.ident or 0))

    def cpu_s(self) -> float | None:
        """Seconds that the loop's thread has computed; None where the system does not say."""
        if not hasattr(time, "pthread_getcpuclockid") or self.thread.ident is None or not self.thread.is_alive():
            return None
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))

    def stop(self) -> None:
        """Cancel what runs and end the thread, as soon as it gets to it."""
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _begin(self, run: Run, code: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        if run.cancelled or run.future.done():
            run.resolve(error=asyncio.CancelledError())
            return
        run.task = self.loop.create_task(self._run(run, code), name=run.label, context=context_of(run))

    async def _run(self, run: Run, code: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        run.started.set_result(time.monotonic())
        try:
            run.resolve(result=await code())
        except BaseException as error:  # whatever the user's code raises, SystemExit included, is this run's outcome
            run.resolve(error=error)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **arguments: Any) -> asyncio.Task[Any]:
        context = arguments.get("context")
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **arguments)
        self._owners[task] = context.get(owner) if context is not None else owner.get()
        return task

    def _answer(self) -> None:
        self.beat_pending = False

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # from a task that the user's code spawned
                log.warning("user code called for the end of the process (%r): ignored", error)
        remaining = asyncio.all_tasks(self.loop)
        for task in remaining:
            task.cancel()
        if remaining:
            self.loop.run_until_complete(asyncio.wait(remaining, timeout=GRACE_S))
        if asyncio.all_tasks(self.loop):
            never_ended.append(self)
            return
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class Suspicion:
    """For how long the loop has been in one thing, as the watchdog may say it. Time in which the watchdog itself did
    not get its turn, and the loop's thread did not compute either, belongs to neither: the machine was busy elsewhere.
    """

    def __init__(self) -> None:
        self.what: Any = None
        self._since = self._looked = 0.0
        self._cpu_s: float | None = None

    def look(self, what: Any, now: float, cpu_s: float | None) -> float:
        """Seconds; `what` the loop is in now (None: nothing), `cpu_s` that its thread has computed so far, if known."""
        late = now - self._looked - 2 * WATCH_EVERY_S
        computed = late if cpu_s is None or self._cpu_s is None else max(0.0, cpu_s - self._cpu_s)
        self._looked, self._cpu_s = now, cpu_s
        if what is None or what != self.what:
            self.what, self._since = what, now
        elif late > 0.0:
            self._since += max(0.0, late - computed)
        return now - self._since


class UserLoop:
    """Runs user code on a loop thread of its own and replaces the thread when user code hangs it."""

    def __init__(self, *, warn_after_s: float = WARN_AFTER_S) -> None:
        self._warn_after_s = warn_after_s
        self._lock = threading.Lock()
        self._current = LoopThread()
        self._warned: set[str] = set()
        self._closed = threading.Event()
        self._suspect = Suspicion()
        self._watchdog = threading.Thread(target=self._watch, name="sharpen-watchdog", daemon=True)
        self._watchdog.start()

    def start(self, run: Run, code: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine function. The run's time limit is only what the watchdog measures blocking code by."""
        with self._lock:
            self._current.start(run, code)

    def cancel(self, run: Run) -> None:
        """Ask a run to end. Code that blocks the loop, or swallows the cancellation, does not."""
        run.cancelled = True
        task = run.task
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def is_blocked(self) -> bool:
        """Whether the loop has not answered the watchdog's last look."""
        return self._suspect.what is not None

    def close(self) -> None:
        """Cancel everything and end the threads; what hangs is left behind as a daemon."""
        self._closed.set()
        self._watchdog.join()
        with self._lock:
            self._current.stop()
            if self._current.thread is not threading.current_thread():
                self._current.thread.join(timeout=2 * GRACE_S)
            for run in tuple(self._current.runs):
                run.resolve(error=asyncio.CancelledError())

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_EVERY_S):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        """One look of the watchdog: the same task on the loop since an unanswered heartbeat is a block."""
        current = self._current
        if not current.beat_pending:
            self._suspect.look(None, now, current.cpu_s())
            current.beat()
            return
        task, run, place = current.doing()
        blocked_s = self._suspect.look(task if task is not None else place, now, current.cpu_s())
        if self._suspect.what is None or not blocked_s:
            return
        if blocked_s < self._warn_after_s and not (run is not None and run.overdue(now)):
            return
        self._warn(run, place, blocked_s, current.importing())
        limit_s = min((other.timeout_s for other in tuple(current.runs)), default=float("inf"))
        if blocked_s >= GRACE_S / 2 and ((run is not None and run.overdue(now)) or blocked_s > limit_s):
            self._abandon(current, run, place)

    def _warn(self, run: Run | None, place: str | None, blocked_s: float, module: str | None) -> None:
        where = place or "code that cannot be seen from Python"
        if (what := f"{where} {module}") in self._warned:
            return
        self._warned.add(what)
        if module is not None:
            log.warning(
                "%s imports %s for the first time (%.1f s so far, rollout %s): all rollouts wait for it, this once. "
                "Import it where your module begins",
                where,
                module,
                blocked_s,
                run.label if run is not None else "unknown",
            )
            return
        log.warning(
            "%s blocks the event loop (%.1f s so far, rollout %s): all rollouts wait for it. "
            "Use an async call, or `await asyncio.to_thread(...)`",
            where,
            blocked_s,
            run.label if run is not None else "unknown",
        )

    def _abandon(self, hung: LoopThread, culprit: Run | None, place: str | None) -> None:
        with self._lock:
            self._current = LoopThread()
        self._suspect = Suspicion()
        where = place or "code that cannot be seen from Python"
        known = culprit is not None and not culprit.future.done()
        name = culprit.label if culprit is not None else "unknown"
        log.warning("%s (rollout %s) blocked the event loop past the time limit: a new loop goes on", where, name)
        hung.stop()
        for run in tuple(hung.runs):
            if run is culprit:
                run.resolve(error=LoopBlockedError(f"blocked the event loop past the time limit ({where})"))
            else:
                run.resolve(error=LoopAbandonedError(f"rollout {name} blocked the event loop ({where})", known))
