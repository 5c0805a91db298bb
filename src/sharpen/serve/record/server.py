"""`sharpen record`: forwards calls to another server and records them, until it is told to end.

In: the server's URL, the folder of the recording, where to listen. Out: a run directory, whose `run.db` holds every
call, and `record.json`, which says what was recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sharpen import __version__
from sharpen.config.sections import GatewayConfig
from sharpen.gateway.listening import AppServer, url_of
from sharpen.interrupts import stop_signals
from sharpen.learning.experience.journal import Journal
from sharpen.models.files import model_folder
from sharpen.placement.serving import ServingThread
from sharpen.run.lock import locked
from sharpen.serve.openapi import recorder_document
from sharpen.serve.record.folder import JOURNAL, open_folder
from sharpen.serve.record.proxy import Proxy
from sharpen.serve.record.sessions import RecordedSessions
from sharpen.serve.record.upstream import Upstream

LOOK_S = 1.0
"""How often it looks for sessions that have been idle for too long."""
GRACE_S = 30
"""How long running requests may still take when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to record: the server's URL and its key (None if it needs none), the folder, the recorder's own key, where
    it listens, when a session has been idle for too long, and the model whose tokenizer shows the tokens, if any."""

    upstream: str
    upstream_key: str | None
    folder: Path
    key: str
    listen: GatewayConfig
    idle_s: float
    model: str | None = None


def record(options: Options, say: Callable[[str], None]) -> None:
    """Record until told to end. Raises `ConfigError` or `ModelError` for bad input, `JournalError` at the end if
    something could not be recorded."""
    upstream = Upstream(options.upstream, options.upstream_key)
    if options.model is not None:
        model_folder(options.model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_signals())
        options.folder.mkdir(parents=True, exist_ok=True)
        if note := stack.enter_context(locked(options.folder)):
            say(note)
        open_folder(options.folder, upstream.shown, options.model)
        sessions = RecordedSessions(
            stack.enter_context(Journal(options.folder / JOURNAL)), idle_s=options.idle_s, say=say
        )
        if number := sessions.restore():
            say(f"{number} sessions of before go on")
        proxy = Proxy(
            upstream,
            sessions,
            options.key,
            recorder_document(__version__),
            say,
            open_=options.listen.is_loopback,
            max_body_mb=options.listen.max_body_mb,
        )
        stack.enter_context(_running(proxy, upstream, sessions, options, say))
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        say("ending; waiting for running requests" if proxy.requests.running else "ending")
    if sessions.failure is not None:
        raise sessions.failure


@contextlib.contextmanager
def _running(
    proxy: Proxy, upstream: Upstream, sessions: RecordedSessions, options: Options, say: Callable[[str], None]
) -> Iterator[None]:
    """Serve for the time of a block, and end idle sessions; then answer what is running."""

    async def end_idle() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            sessions.end_idle()

    async def start() -> AppServer:
        server = AppServer(proxy, options.listen, log_level="critical", grace_s=GRACE_S)
        url = url_of(options.listen, server.port, None)
        sessions.address = lambda: url  # before the first request
        await server.start()
        return server

    with contextlib.closing(ServingThread()) as thread:
        server = thread.call(start())
        thread.start(end_idle())
        say(f"recording {upstream.shown} at {sessions.address()} in {options.folder}  (Ctrl-C ends)")
        try:
            yield
        finally:
            thread.call(server.stop())
            thread.call(upstream.close())
