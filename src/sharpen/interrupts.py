"""What signals do to a run: SIGTERM is Ctrl-C, which waits for a step that is under way; a terminal that is closed
takes the display alone.

In: nothing. Out: handlers, for as long as a run is open. They are set where nobody has set any, and taken back behind.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, at the same places, and let the run outlive SIGHUP.

    SIGTERM is there also where Ctrl-C is ignored, as in the background of a shell. Handlers of the user's are left as
    they are; those that Ray sets in every process which it starts in are not. Outside the main thread, where signals do
    not arrive, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated = False

    def ignored_until_terminated(_signal: int, _frame: object) -> None:
        if terminated:
            raise KeyboardInterrupt

    def terminate(_signal: int, frame: Any) -> None:
        nonlocal terminated
        terminated = True
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    chosen: dict[int, Any] = {}
    if _is_free(signal.SIGTERM):
        chosen[signal.SIGTERM] = terminate
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            chosen[signal.SIGINT] = ignored_until_terminated
    if hasattr(signal, "SIGHUP") and _is_free(signal.SIGHUP):
        chosen[signal.SIGHUP] = signal.SIG_IGN  # as under nohup: what the run starts outlives the terminal too
    before = {number: signal.signal(number, handler) for number, handler in chosen.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_free(number: int) -> bool:
    """Whether a signal ends the process, or is Ray's."""
    handler = signal.getsignal(number)
    return handler is signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("ray.")


@contextlib.contextmanager
def deferred_interrupt(*, again: bool = True) -> Iterator[None]:
    """Let Ctrl-C wait until this block is done; then it is raised, if it is to be raised `again`.

    A second Ctrl-C ends the block at once. Outside the main thread signals do not arrive, and nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal caught
        if caught:
            raise KeyboardInterrupt
        caught = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught and again:
        signal.raise_signal(signal.SIGINT)  # for whoever waits outside: another such block, too
