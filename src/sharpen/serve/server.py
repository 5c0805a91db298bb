"""`sharpen serve MODEL_DIR`: a model served over HTTP until it is told to end.

In: the model, the server's configuration, the key. Out: nothing; returns at Ctrl-C or SIGTERM, once the requests that
were running have been answered. Raises `EngineLostError` if the engine fails for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from sharpen import __version__
from sharpen.config.run import RunConfig
from sharpen.contracts import Engine
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import EngineLostError
from sharpen.gateway.caller import nobody
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.server import Server
from sharpen.interrupts import stop_signals
from sharpen.learning.recipe import Job
from sharpen.models.adapter_files import NamedAdapter
from sharpen.models.files import quiet_transformers
from sharpen.placement.engines import load_policy, make_gateway
from sharpen.placement.serving import ServingThread
from sharpen.run.decide import decide_serving
from sharpen.serve.adapters import adapters_line, check_adapters, read_adapters
from sharpen.serve.front import Front, OneKey
from sharpen.serve.openapi import document
from sharpen.serve.sessions import Sessions

GRACE_S = 30.0
"""How long running requests may still take when the server ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to be called: its files, the serving thread, the engine and the gateway on it."""

    folder: Path
    thread: ServingThread
    engine: Engine
    gateway: Gateway

    def raise_lost(self) -> Never:
        """Raise the error of an engine that can serve no more."""
        raise EngineLostError("the engine can serve no more requests: start the server again")


def serve(
    config: RunConfig,
    *,
    name: str,
    key: str,
    say: Callable[[str], None],
    adapters: Sequence[tuple[str, Path]] = (),
) -> None:
    """Serve the model of `config` by `name` to whoever has the `key`; and `adapters`, each a name and a folder, beside
    it.

    Raises `ConfigError` or `ModelError` for bad input, `EngineLostError` if the engine fails for good.
    """
    beside = read_adapters(adapters, name)
    job = decide_serving(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_signals())
        for line in job.notices:
            say(line)
        model = stack.enter_context(loaded(job, name, say, beside))
        front = Front(model.gateway, OneKey(model.gateway, key), key, document(__version__))
        stack.enter_context(listening(front, model, config, say))
        _wait(front, model, say)


@contextlib.contextmanager
def loaded(
    job: Job[Any], name: str, say: Callable[[str], None], adapters: Sequence[NamedAdapter] = ()
) -> Iterator[Loaded]:
    """Load the model of a job, which clients see by `name`, with `adapters` beside it, for the time of a block."""
    quiet_transformers()
    assert job.engine is not None
    say(job.engine.line)
    config = job.config
    check_adapters(adapters, job.folder, name, job.engine.type)
    with contextlib.ExitStack() as stack:
        thread = ServingThread()
        stack.callback(thread.close)
        tokenizer, engine = load_policy(
            config.model,
            config.engine,
            job.folder,
            thread,
            type=job.engine.type,
            deterministic=config.deterministic,
            alone=True,
            adapters=job.adapters,
        )
        stack.callback(lambda: thread.call(engine.close(), timeout_s=30))
        if adapters:
            assert isinstance(engine, EmbeddedEngine)
            say(adapters_line(adapters, engine.serve_beside(adapters)))
        model = config.model.model_copy(update={"model_path": name})
        names = [one.name for one in adapters]
        gateway = make_gateway(model, engine, tokenizer, thread.loop, listen=config.gateway, adapters=names)
        stack.callback(lambda: thread.call(gateway.close(), timeout_s=10))
        yield Loaded(folder=job.folder, thread=thread, engine=engine, gateway=gateway)


@contextlib.contextmanager
def listening(
    front: Front, model: Loaded, config: RunConfig, say: Callable[[str], None], sessions: Sessions | None = None
) -> Iterator[Server]:
    """Listen for the requests of applications for the time of a block. `sessions` know the address before the first
    request: an application that has waited for the server asks at once."""
    server = Server(front.start, model.thread.loop, nobody, config.gateway)
    if sessions is not None:
        sessions.address = server.url
    try:
        name, length = model.gateway.model_name, config.model.max_model_len
        say(f"serving {name} at {server.url()}  (context: {length} tokens; Ctrl-C ends)")
        yield server
    finally:
        model.thread.call(server.stop(), timeout_s=30)


def _wait(front: Front, model: Loaded, say: Callable[[str], None]) -> None:
    """Wait until the server is told to end, then until its requests have been answered. A second Ctrl-C ends it at
    once. Raises `EngineLostError` if the engine is lost first."""
    try:
        front.lost.wait()
    except KeyboardInterrupt:
        running = front.requests.running
        say(f"ending; waiting for {running} requests (at most {GRACE_S:g} s, or Ctrl-C again)" if running else "ending")
        model.thread.call(front.end(GRACE_S))
        return
    model.raise_lost()
