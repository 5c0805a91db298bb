"""A recorder in front of a server that answers as vLLM's does, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from upstream_like_vllm import Fake

from sharpen.config.sections import GatewayConfig
from sharpen.errors import JournalError
from sharpen.gateway.listening import AppServer
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups
from sharpen.placement.serving import ServingThread
from sharpen.serve.record.proxy import Proxy
from sharpen.serve.record.sessions import RecordedSessions
from sharpen.serve.record.upstream import Upstream
from sharpen.types import Rollout

KEY = "the-key"


def _header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@dataclass
class Recorder:
    """The recorder of a test."""

    fake: Fake
    url: str
    upstream: str
    journal: Journal
    sessions: RecordedSessions
    thread: ServingThread
    proxy: Proxy
    said: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def client(self, key: str = "mine", **options: Any) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options) as client:
            yield client

    def post(self, path: str, key: str = KEY, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", headers=_header(key), json=body)

    def get(self, path: str, key: str = KEY) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=_header(key))

    def metric(self, name: str) -> float:
        text = self.get("/metrics").text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"sharpen_{name} "))

    def rollouts(self) -> list[Rollout]:
        self.journal.flush()
        return [rollout for group in read_groups(self.journal.path) for rollout in group.rollouts]


Start = Callable[..., Recorder]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts recorders; what is given beside the settings of `started` are fields of `Fake`."""
    with contextlib.ExitStack() as stack:

        def close(journal: Journal) -> None:
            with contextlib.suppress(JournalError):  # of a full disk
                journal.close()

        def started(
            *,
            idle_s: float = 600.0,
            open_: bool = True,
            upstream_key: str | None = None,
            max_bytes: int | None = None,
            **fake: Any,
        ) -> Recorder:
            thread = stack.enter_context(contextlib.closing(ServingThread()))
            served, said = Fake(**fake), []
            servers: list[AppServer] = []

            async def stop() -> None:
                await asyncio.gather(*(server.stop() for server in servers))

            stack.callback(lambda: thread.call(stop()))

            def listen(app: Any) -> str:
                async def begin() -> AppServer:
                    server = AppServer(app, GatewayConfig(), log_level="critical")
                    await server.start()
                    return server

                server = thread.call(begin())
                servers.append(server)
                return f"http://127.0.0.1:{server.port}"

            upstream = Upstream(f"{listen(served)}/v1", upstream_key)
            stack.callback(lambda: thread.call(upstream.close()))
            journal = Journal(tmp_path / "run.db", max_bytes=max_bytes)
            stack.callback(close, journal)
            sessions = RecordedSessions(journal, idle_s=idle_s, say=said.append)
            sessions.restore()
            proxy = Proxy(upstream, sessions, KEY, {"openapi": "3.1.0"}, said.append, open_=open_, max_body_mb=64)
            url = listen(proxy)
            sessions.address = lambda: f"{url}/v1"
            return Recorder(served, url, upstream.url, journal, sessions, thread, proxy, said)

        yield started


@pytest.fixture
def recorder(start: Start) -> Recorder:
    return start()
