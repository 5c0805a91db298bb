"""Runs the user's code on a separate thread and event loop, which is watched and replaced if it hangs.

In: coroutine functions. Out: their results, or an error that says which run blocked the loop, and where.

    caller ──start()──► current loop thread ──► Run.future
                              ▲ heartbeat
                        watchdog thread: warns of blocking code; after the time limit abandons the loop, starts another

Blocking code (say `time.sleep` in an `async def`) cannot be cancelled. Its thread is abandoned (as a daemon, it does
not delay the exit), and its run ends with `LoopBlockedError`. Other runs on the loop end with `LoopAbandonedError`:
they did nothing wrong, and can be started again.
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

from sharpen.agent.rollout.places import imported_by, place_of_frame

log = logging.getLogger("sharpen.rollout")

T = TypeVar("T")
GRACE_S = 0.5
"""How long a cancelled run may take to end."""
WATCH_EVERY_S = 0.1
"""The interval of the watchdog's checks."""
WARN_AFTER_S = 1.0
"""A loop that is blocked for longer causes a warning."""

owner: contextvars.ContextVar[Run | None] = contextvars.ContextVar("sharpen_run", default=None)
"""The run that the current user code belongs to; tasks that it spawns inherit it."""

_unfinished_loops: list[LoopThread] = []
"""Closed loops with tasks that ignore cancellation, kept because a pending task must not be garbage-collected."""


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
    """One run of user code on the loop. `started` and `future` resolve on the loop's thread.

    `misuse` is the reason to fail the run regardless of its result: it called another run's model, or another run
    called its own.
    """

    def __init__(self, label: str, timeout_s: float) -> None:
        self.label = label
        self.timeout_s = timeout_s
        self.started: Future[float] = Future()
        self.future: Future[Any] = Future()
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False
        self.misuse: str | None = None

    def fail(self, reason: str) -> None:
        """Mark the run as failed; the first reason is kept. From any thread."""
        self.misuse = self.misuse or reason

    def let_go(self, _: asyncio.Task[None]) -> None:
        """Forget the task, which has ended: its loop knows the owner of a task for as long as the task is known."""
        self.task = None

    def overdue(self, now: float) -> bool:
        """Whether the run's time limit and half its grace period have passed."""
        return self.started.done() and now > self.started.result() + self.timeout_s + GRACE_S / 2

    def resolve(self, *, result: Any = None, error: BaseException | None = None) -> None:
        """Set the result or error, unless one is already set."""
        try:
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
        except InvalidStateError:
            pass  # an abandoned run that ended later


def context_of(run: Run) -> contextvars.Context:
    """Return a context in which code belongs to this run."""
    context = contextvars.copy_context()
    context.run(owner.set, run)
    return context


class DaemonThreads(ThreadPoolExecutor):
    """The executor of `asyncio.to_thread`: a new daemon thread for each call.

    An ordinary pool's threads are joined at exit, so a workflow that never returns would keep the process alive. A pool
    also has few threads, so blocking agents would run one after another.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # raised where the work is awaited
                future.set_exception(error)

        threading.Thread(target=work, name="sharpen-blocking-code", daemon=True).start()
        return future


class LoopThread:
    """One thread that runs one event loop, with the owner of each task on it."""

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
        """Send the loop a heartbeat, which it answers unless it is blocked."""
        self.beat_pending = True
        self.loop.call_soon_threadsafe(self._answer)

    def current_activity(self) -> tuple[Any, Run | None, str | None]:
        """Return the task that the loop's thread runs now, its run, and its place; (None, None, None) if idle."""
        task = asyncio.current_task(self.loop)
        place = place_of_frame(sys._current_frames().get(self.thread.ident or 0), user_only=task is None)
        return task, self._owners.get(task) if task is not None else None, place

    def importing(self) -> str | None:
        """Return the module that the loop's thread is importing now, if any."""
        return imported_by(sys._current_frames().get(self.thread.ident or 0))

    def cpu_s(self) -> float | None:
        """Return the CPU seconds of the loop's thread; None if the system does not report them."""
        if not hasattr(time, "pthread_getcpuclockid") or self.thread.ident is None or not self.thread.is_alive():
            return None
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))

    def stop(self) -> None:
        """Cancel all tasks and end the thread, once the loop is not blocked."""
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _begin(self, run: Run, code: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        if run.cancelled or run.future.done():
            run.resolve(error=asyncio.CancelledError())
            return
        run.task = self.loop.create_task(self._run(run, code), name=run.label, context=context_of(run))
        run.task.add_done_callback(run.let_go)

    async def _run(self, run: Run, code: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        run.started.set_result(time.monotonic())
        try:
            run.resolve(result=await code())
        except BaseException as error:  # whatever the user's code raises, even SystemExit, is this run's outcome
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
                log.warning("user code tried to end the process (%r): ignored", error)
        remaining = asyncio.all_tasks(self.loop)
        for task in remaining:
            task.cancel()
        if remaining:
            self.loop.run_until_complete(asyncio.wait(remaining, timeout=GRACE_S))
        if asyncio.all_tasks(self.loop):
            _unfinished_loops.append(self)
            return
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class BlockTimer:
    """Measures how long the loop has been in the same activity.

    Time in which neither the watchdog nor the loop's thread got any CPU does not count: the machine was busy elsewhere.
    """

    def __init__(self) -> None:
        self.activity: Any = None
        self._since = self._looked = 0.0
        self._cpu_s: float | None = None

    def update(self, activity: Any, now: float, cpu_s: float | None) -> float:
        """Record the loop's activity (None: idle) and its thread's total CPU seconds (None: unknown) at time `now`.

        Return the seconds since the activity began.
        """
        late = now - self._looked - 2 * WATCH_EVERY_S
        computed = late if cpu_s is None or self._cpu_s is None else max(0.0, cpu_s - self._cpu_s)
        self._looked, self._cpu_s = now, cpu_s
        if activity is None or activity != self.activity:
            self.activity, self._since = activity, now
        elif late > 0.0:
            self._since += max(0.0, late - computed)
        return now - self._since


class UserLoop:
    """Runs user code on a loop thread, which is replaced if user code blocks it."""

    def __init__(self, *, warn_after_s: float = WARN_AFTER_S) -> None:
        self._warn_after_s = warn_after_s
        self._lock = threading.Lock()
        self._current = LoopThread()
        self._warned: set[str] = set()
        self._closed = threading.Event()
        self._block_timer = BlockTimer()
        self._watchdog = threading.Thread(target=self._watch, name="sharpen-watchdog", daemon=True)
        self._watchdog.start()

    def start(self, run: Run, code: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Start a coroutine function. The run's time limit is enforced here for blocking code only."""
        with self._lock:
            self._current.start(run, code)

    def cancel(self, run: Run) -> None:
        """Cancel a run. Code that blocks the loop, or catches the cancellation, is not stopped."""
        run.cancelled = True
        task = run.task
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def is_blocked(self) -> bool:
        """Whether the loop had not answered at the watchdog's last check."""
        return self._block_timer.activity is not None

    def close(self) -> None:
        """Cancel everything and end the threads. A thread that hangs is left as a daemon."""
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
            self._check(time.monotonic())

    def _check(self, now: float) -> None:
        """Check once: the loop is blocked if it has been in the same task since an unanswered heartbeat."""
        current = self._current
        if not current.beat_pending:
            self._block_timer.update(None, now, current.cpu_s())
            current.beat()
            return
        task, run, place = current.current_activity()
        blocked_s = self._block_timer.update(task if task is not None else place, now, current.cpu_s())
        if self._block_timer.activity is None or not blocked_s:
            return
        if run is not None and task is run.task and run.future.done():
            return  # the user's code has returned: the rest of this task is ours
        if blocked_s < self._warn_after_s and not (run is not None and run.overdue(now)):
            return
        self._warn(run, place, blocked_s, current.importing())
        limit_s = min((other.timeout_s for other in tuple(current.runs)), default=float("inf"))
        if blocked_s >= GRACE_S / 2 and ((run is not None and run.overdue(now)) or blocked_s > limit_s):
            self._abandon(current, run, place)

    def _warn(self, run: Run | None, place: str | None, blocked_s: float, module: str | None) -> None:
        where = place or "code that cannot be seen from Python"
        if (key := f"{where} {module}") in self._warned:
            return
        self._warned.add(key)
        if module is not None:
            log.warning(
                "%s imports %s for the first time (%.1f s so far, rollout %s): all rollouts wait for it once. "
                "Import it at the top of your module",
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
        self._block_timer = BlockTimer()
        where = place or "code that cannot be seen from Python"
        known = culprit is not None and not culprit.future.done()
        name = culprit.label if culprit is not None else "unknown"
        log.warning("%s (rollout %s) blocked the event loop past the time limit: a new loop takes over", where, name)
        hung.stop()
        for run in tuple(hung.runs):
            if run is culprit:
                run.resolve(error=LoopBlockedError(f"blocked the event loop past the time limit ({where})"))
            else:
                run.resolve(error=LoopAbandonedError(f"rollout {name} blocked the event loop ({where})", known))
