"""One worker process as the run sees it, under a keeper that ends all that came from it.

In: `Start`, then one `Order` at a time. Out: `Done`, or `Died` with the reason. The process ends by itself, when it
passes its memory limit, or when `end` is called; in each case with every process that it has started.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sharpen.agent.rollout.places import stored_text
from sharpen.agent.sandbox.command import Ended, Lifeline, Limits
from sharpen.agent.sandbox.keeper import Order as KeeperOrder
from sharpen.agent.sandbox.local import Output, keep, open_files
from sharpen.errors import SharpenError
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

# What a worker process writes, shown as it comes.
#
# In: bytes of its standard output or error, the rollout that it works on. Out: text on the same stream of this process,
# a bounded amount for each attempt; the last of it is kept for the report of a crash.

MAX_SHOWN = 1_000_000
"""Characters of one attempt that are shown, on each of the two streams."""
LAST_WORDS = 8000


class Shown(Output):
    """Shows the output of a worker process, and keeps its last words."""

    def __init__(self, stream: str) -> None:
        super().__init__(2 * LAST_WORDS)
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rollout_id, self._left, self._last = "", MAX_SHOWN, ""

    def begin(self, rollout_id: str) -> None:
        """Begin an attempt: it may write so much again, and what was written before is not its own."""
        self._rollout_id, self._left, self._last = rollout_id, MAX_SHOWN, ""

    def add(self, data: bytes) -> None:
        """Show the next bytes."""
        text = self._decoder.decode(data)
        self._last = (self._last + text)[-LAST_WORDS:]
        if self._left <= 0:
            return
        shown, self._left = text[: self._left], self._left - len(text)
        if self._left <= 0:
            shown += f"\n[rollout {self._rollout_id} wrote more than {MAX_SHOWN:,} characters: the rest is left out]\n"
        getattr(sys, self._stream).write(shown)

    @property
    def last_words(self) -> str:
        """The end of what the current attempt wrote."""
        return stored_text(self._last.strip())


BOOT = (
    "import sys; sys.path[:], sys.argv[1:] = sys.argv[2:], []; "
    "from sharpen.placement.isolated.worker import main; main({file})"
)
JOIN_S = 20.0

Reply = Callable[[Question], Any]
"""Gives the answer to a question, or an awaitable of it. Raises what the worker is to raise."""
Log = Callable[[Logged], None]


@dataclass(frozen=True, slots=True)
class Died:
    """The process has ended before its attempt: why, and its last words."""

    reason: str
    words: str


class WorkerProcess:
    """A worker process from its start to its end. All but `end` and `join` on one event loop."""

    def __init__(self, start: Start, memory_mb: float | None, reply: Reply, log: Log) -> None:
        self._loop = asyncio.get_running_loop()
        self._reply, self._log = reply, log
        self._outputs = Shown("stdout"), Shown("stderr")
        self._death: Died | None = None
        self._lifeline = Lifeline()
        here, self._there = socket.socketpair()
        self._channel = Channel(here.detach())
        self._memory_mb = memory_mb
        self._next: asyncio.Future[Ready | Done | Failed | Died] = self._loop.create_future()
        self._answering: set[asyncio.Task[None]] = set()
        self._reader = threading.Thread(target=self._read, name="sharpen-worker-messages", daemon=True)
        self._keeper = threading.Thread(target=self._keep, args=(start.code.paths,), name="sharpen-worker", daemon=True)
        self._reader.start()
        self._keeper.start()
        self.alive = True
        self._start = start

    async def ready(self) -> Ready | Failed | Died:
        """Wait until the process has loaded the user's functions."""
        return cast(Ready | Failed | Died, await self._send(self._start))

    async def run(self, order: Order, limit_s: float) -> Done | Failed | Died | None:
        """Make an attempt. None if it takes longer than `limit_s` seconds. Raises what pickling the task raises."""
        if self._death is not None:
            return self._death
        self._next = self._loop.create_future()
        for output in self._outputs:
            output.begin(order.rollout_id)
        try:
            async with asyncio.timeout(limit_s):
                return cast(Done | Failed | Died, await self._send(order))
        except TimeoutError:
            return None

    def end(self, reason: str) -> None:
        """End the process with all that came from it. Does not wait. From any thread."""
        self.alive = False
        self._lifeline.end(reason)

    @property
    def ended(self) -> bool:
        """Whether the process, and all that came from it, has ended."""
        return not self._keeper.is_alive()

    def join(self) -> None:
        """Wait for its end."""
        self._keeper.join(JOIN_S)

    async def _send(self, message: Start | Order) -> Any:
        """Send a message beside the loop, which a process that reads nothing must not hold, and await what follows."""
        with contextlib.suppress(OSError):  # it has ended, which is what comes next
            await asyncio.to_thread(self._channel.send, message)
        return await self._next

    def _keep(self, paths: Sequence[str]) -> None:
        """Run the process to its end, and tell the loop."""
        file = self._there.fileno()
        arguments = [sys.executable, "-u", "-X", "faulthandler", "-c", BOOT.format(file=file), "worker", *paths]
        try:
            order: KeeperOrder = {
                "arguments": arguments,
                "environment": dict(os.environ),
                "folder": os.getcwd(),
                "time_s": None,
                "memory_bytes": None if self._memory_mb is None else int(self._memory_mb * 2**20),
                "afterwards": [],
                "remove": "",
                "trainer": -1,
                "open_files": open_files(),
            }
            limits = Limits(memory_mb=self._memory_mb)
            ended = keep(order, limits, self._lifeline, prefix=(), files=[file], outputs=self._outputs)
            died = self._died(ended)
        except (SharpenError, OSError) as error:
            died = Died(f"could not be run: {error}", "")
        with contextlib.suppress(OSError):
            self._there.shutdown(socket.SHUT_RDWR)  # what could not be killed may hold it open too
        self._there.close()
        self._reader.join()
        self._channel.close()
        self.alive = False
        self._tell(died)

    def _died(self, ended: Ended) -> Died:
        words = self._outputs[1].last_words
        limited = self._memory_mb is not None
        if ended.ended_by == "memory" or (limited and ended.exit_code == OUT_OF_MEMORY):
            return Died(f"used more than {self._memory_mb:g} MB (rollout.memory_mb)", words)
        if ended.ended_by:
            return Died(ended.ended_by, words)
        if ended.exit_code >= 0:
            return Died(f"ended with exit code {ended.exit_code}", words)
        name = signal.Signals(-ended.exit_code).name
        hint = ": was this machine out of memory?" if name == "SIGKILL" else ""
        return Died(f"was ended by {name}{hint}", words)

    def _read(self) -> None:
        """Receive until the process has ended."""
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                return
            except Exception as error:  # what the worker sent cannot be read here
                message = Failed(sendable(error))
            if isinstance(message, Question):
                self._answer(message)
            elif isinstance(message, Logged):
                self._log(message)
            else:
                self._tell(message)

    def _tell(self, message: Ready | Done | Failed | Died) -> None:
        def set_next() -> None:
            if isinstance(message, Died):
                self._death = message
            if not self._next.done():
                self._next.set_result(message)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(set_next)

    def _answer(self, question: Question) -> None:
        try:
            value = self._reply(question)
        except Exception as error:  # raised where it was asked
            self._send_answer(Answer(question.number, error=sendable(error)))
            return
        if isinstance(value, Awaitable):
            self._loop.call_soon_threadsafe(self._answer_later, question.number, value)
        else:
            self._send_answer(Answer(question.number, value))

    def _answer_later(self, number: int, value: Awaitable[Any]) -> None:
        async def answer() -> None:
            try:
                found = Answer(number, await value)
            except Exception as error:
                found = Answer(number, error=sendable(error))
            await asyncio.to_thread(self._send_answer, found)

        task = self._loop.create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _send_answer(self, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # the process has ended
            self._channel.send(answer)
