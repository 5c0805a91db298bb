"""The serving thread, whose asyncio loop runs the gateway and the engine.

In: coroutines from any thread. Out: their results. User code never runs here, so neither a blocking workflow nor a
synchronous client inside an async one can deadlock the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_CLOSE_SECONDS = 300.0  # vLLM may be starting, which blocks the loop


class ServingThread:
    """A daemon thread that runs one event loop until `close()`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sharpen-serving", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Run a coroutine on the serving loop and wait for its result. Must not be called from the loop itself."""
        return self.start(coroutine).result(timeout_s)

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the serving loop and return at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """Cancel the running tasks, stop the loop and join the thread."""
        if self.loop.is_closed():
            return
        self.call(_cancel_all(), timeout_s=_CLOSE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=_CLOSE_SECONDS)
        self.loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
