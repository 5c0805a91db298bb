"""Reports a run that stands still: who waits where, once for each standstill. It never ends anything.

In: a function that counts what the run finishes (calls of the model, rollouts, steps, messages). Out: one warning with
the places where rollouts and threads wait, and a file with all their stacks.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharpen.agent.rollout.places import place_of_frame, place_of_task
from sharpen.config.secrets import hide
from sharpen.files import write_whole

log = logging.getLogger("sharpen.run")

LOOKS = 10
"""How often it looks within the time after which it reports."""
MAX_SHOWN = 8
"""Rollouts that the warning names."""


class StallWatch:
    """Looks, on a thread of its own, whether `count` changes. After `limit_s` seconds without a change it writes all
    stacks to `file` and warns. `way_out` says how the run can be ended."""

    def __init__(self, limit_s: float, count: Callable[[], object], file: Path, way_out: str) -> None:
        self._limit_s, self._count, self._file, self._way_out = limit_s, count, file, way_out
        self._seen, self._since, self._reported = count(), time.monotonic(), False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sharpen-stall-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def look(self, now: float) -> bool:
        """Look once, at a time of `time.monotonic`. Return whether this was reported as a standstill."""
        if (count := self._count()) != self._seen:
            self._seen, self._since, self._reported = count, now, False
        if self._reported or now - self._since < self._limit_s:
            return False
        self._reported = True
        try:
            write_whole(self._file, hide(stacks()))
            where = f"all stacks: {self._file}"
        except OSError as error:
            where = f"the stacks could not be written: {error}"
        lines = (f"nothing has been finished for {now - self._since:.0f} s (stall_report_s)", *who_waits())
        log.warning("%s\n%s; %s", "\n  ".join(lines), self._way_out, where)
        return True

    def _watch(self) -> None:
        while not self._closed.wait(self._limit_s / LOOKS):
            self.look(time.monotonic())


def who_waits() -> list[str]:
    """Return a line for each rollout that has not ended, up to a number, and for the main thread."""
    places: dict[str, str] = {}
    for task in _tasks():
        name, place = task.get_name(), place_of_task(task, user_only=True)
        if "/" in name and (place is not None or name not in places):  # a rollout's id
            places[name] = place or "no line of your code"
    lines = [f"rollout {name} waits at {places[name]}" for name in sorted(places)[:MAX_SHOWN]]
    if len(places) > MAX_SHOWN:
        lines.append(f"and {len(places) - MAX_SHOWN} more rollouts")
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [
        *lines,
        f"the main thread is at {_exact(frame) if place_of_frame(frame) is None else place_of_frame(frame)}",
    ]


def stacks() -> str:
    """Return the stack of each thread, and of each task that has not ended."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    for task in _tasks():
        waiting: Any = task.get_coro()
        lines = []
        while (frame := getattr(waiting, "cr_frame", None)) is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n')
            waiting = getattr(waiting, "cr_await", None)
        parts.append(f"task {task.get_name()}:\n{''.join(lines)}")
    return "\n".join(parts)


def _tasks() -> list[asyncio.Task[object]]:
    return [one for one in gc.get_objects() if issubclass(type(one), asyncio.Task) and not one.done()]


def _exact(frame: object) -> str:
    code, line = getattr(frame, "f_code", None), getattr(frame, "f_lineno", 0)
    return "an unknown place" if code is None else f"{code.co_filename}:{line} in {code.co_name}"
