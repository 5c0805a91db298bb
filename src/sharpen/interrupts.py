"""Signal handlers of a run: SIGTERM acts like Ctrl-C, which waits for the current step, and a run survives the closing
of its terminal.

In: nothing. Out: signal handlers while a run is open. They are set only for signals without handlers, and removed
afterwards.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Make SIGTERM act like Ctrl-C, and ignore SIGHUP, during a block.

    SIGTERM works even if Ctrl-C is ignored, as in a shell's background job. Handlers set by the user are kept; those
    that Ray sets in each of its processes are replaced. Outside the main thread, which alone receives signals, nothing
    is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated = False

    def ignore_until_terminated(_signal: int, _frame: object) -> None:
        if terminated:
            raise KeyboardInterrupt

    def terminate(_signal: int, frame: Any) -> None:
        nonlocal terminated
        terminated = True
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    handlers: dict[int, Any] = {}
    if _is_free(signal.SIGTERM):
        handlers[signal.SIGTERM] = terminate
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            handlers[signal.SIGINT] = ignore_until_terminated
    if hasattr(signal, "SIGHUP") and _is_free(signal.SIGHUP):
        handlers[signal.SIGHUP] = signal.SIG_IGN  # as with nohup: child processes inherit it and survive too
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_free(number: int) -> bool:
    """Whether a signal has its default handler, or one set by Ray."""
    handler = signal.getsignal(number)
    return handler is signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("ray.")


@contextlib.contextmanager
def deferred_interrupt(*, again: bool = True) -> Iterator[None]:
    """Delay Ctrl-C until the end of a block. With `again` it is then raised, else dropped.

    A second Ctrl-C interrupts the block at once. Outside the main thread, which alone receives signals, nothing is
    changed.
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
        signal.raise_signal(signal.SIGINT)  # for the surrounding handler, which may be another such block
