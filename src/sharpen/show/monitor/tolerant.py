"""A monitor that never ends or holds a run: writes to it wait in a queue, beside the run.

In: a function that opens a sink, numbers and texts of steps. Out: what the sink takes, in order, by a thread of its
own. What it refuses is tried again, with what comes next or after a while, and at the end; what it missed then is
counted.

    log, sample, rollouts ─► queue ─► [its thread: open, write, close] ─► sink
             └─ waits a moment for the queue: a sink that answers has each step when the call returns
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sharpen.config.secrets import hide
from sharpen.contracts import Rows, Sink, TakesRollouts, TakesSamples

PATIENCE_S = 2.0
"""How long a call waits for a sink that answers; one that did not is not waited for until it has caught up."""
RETRY_S = 30.0
"""How soon a refused write is tried again, if nothing new is written before."""
MAX_TRIES = 5
"""Tries of one write, after which the next ones have their turn. Opening is tried whenever there is something new."""
MAX_WAITING = 1000
"""Writes that wait; the oldest are left out."""
CLOSE_S = 60.0
"""How long the end of a run waits for what the sink has not taken."""


@dataclass(slots=True, eq=False)
class _Write:
    """A write that waits: what the sink is to do, in words and as a function. `tries` have failed."""

    what: str
    write: Callable[[Sink], None]
    tries: int = 0


class TolerantSink:
    """A sink whose failures do not stop the run: a service may be down, a disk full. `open_` opens it, and `say` is
    called with a message at the first failure, on the caller's thread.

    Of the `asked` writes it `missed` some for good; `refused` tries failed.
    """

    def __init__(
        self,
        name: str,
        open_: Callable[[], Sink],
        say: Callable[[str], None],
        *,
        patience_s: float = PATIENCE_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._name, self._open, self._say = name, open_, say
        self._patience_s, self._close_s = patience_s, close_s
        self._sink: Sink | None = None
        self.asked = self.refused = self.missed = 0
        self._news: str | None = None
        self._changed = threading.Condition()
        self._waiting: deque[_Write] = deque()
        self._fresh = self._closing = self._idle = self._late = False
        threading.Thread(target=self._work, name="sharpen-monitor", daemon=True).start()
        self._put(_Write("be opened", lambda sink: None))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        numbers = dict(metrics)
        self._put(_Write(f"take the numbers of step {step}", lambda sink: sink.log(step, numbers)))

    def sample(self, step: int, text: str) -> None:
        """Show a text of a step, if the sink takes some."""

        def write(sink: Sink) -> None:
            if isinstance(sink, TakesSamples):
                sink.sample(step, text)

        self._put(_Write(f"take the sample of step {step}", write))

    def rollouts(self, step: int, rows: Rows) -> None:
        """Show rollouts of a step, if the sink takes tables."""

        def write(sink: Sink) -> None:
            if isinstance(sink, TakesRollouts):
                sink.rollouts(step, rows)

        self._put(_Write(f"take the rollouts of step {step}", write))

    def close(self) -> None:
        """Write what waits, and finish. What takes too long is given up."""
        self._put(_Write("be closed", lambda sink: sink.close()), self._close_s, last=True)
        with self._changed:
            self.missed += len(self._waiting)
            self._waiting.clear()

    @property
    def line(self) -> str:
        """What it refused over the run, as text; empty if nothing."""
        if self.missed:
            return f"{self._name} missed {self.missed} of {self.asked} writes: metrics.jsonl has every number"
        if self.refused:
            return f"{self._name} refused {self.refused} writes at first, and took them later"
        return ""

    def _put(self, write: _Write, patience_s: float | None = None, *, last: bool = False) -> None:
        """Let a write wait its turn, and wait for it a moment. After the `last` the thread ends."""
        with self._changed:
            self._closing = self._closing or last
            self.asked += 1
            self._waiting.append(write)
            if len(self._waiting) > MAX_WAITING:
                del self._waiting[1]  # the first may be in work
                self.missed += 1
            self._fresh, self._idle = True, False
            self._changed.notify_all()
            if patience_s is not None or not self._late:
                self._late = not self._changed.wait_for(lambda: self._idle, patience_s or self._patience_s)
            news, self._news = self._news, None
        if news is not None:
            self._say(news)

    def _work(self) -> None:
        """Write what waits, in its order, until the sink is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fresh, RETRY_S if self._waiting else None)
                self._fresh = False
            self._write_all()
            with self._changed:
                self._idle, self._late = not self._fresh, False
                self._changed.notify_all()
                if self._closing and not self._fresh:
                    return

    def _write_all(self) -> None:
        """Write until the sink refuses, or at the end of the run until each has been tried once more."""
        while self._waiting:
            write = self._waiting[0]
            accepted = self._try(write)
            with self._changed:
                last = self._closing or (write.tries >= MAX_TRIES and self._sink is not None)
                if self._closing and self._sink is None:  # it is not there: nothing else is asked of it
                    self.missed += len(self._waiting)
                    self._waiting.clear()
                    return
                if not accepted and not last:
                    return
                if self._waiting and self._waiting[0] is write:
                    self._waiting.popleft()
                    self.missed += not accepted

    def _try(self, write: _Write) -> bool:
        """Try a write; note the first failure."""
        try:
            if self._sink is None:
                self._sink = self._open()
            write.write(self._sink)
        except BaseException as error:  # the boundary to a package and a service that are not ours, in their thread
            write.tries += 1
            reason = hide((str(error).strip() or type(error).__name__).splitlines()[0])
            with self._changed:
                self.refused += 1
                if self.refused == 1:
                    what = "be opened" if self._sink is None else write.what
                    self._news = (
                        f"  ! {self._name} could not {what} ({type(error).__name__}: {reason}): the run continues, "
                        "metrics.jsonl has every number; it is tried again, and what is missing at the end is counted"
                    )
            return False
        return True
