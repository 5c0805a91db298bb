"""`sharpen serve MODEL_DIR`: a model served over HTTP until it is told to end.

In: the model, the server's configuration, the key. Out: nothing; returns at Ctrl-C or SIGTERM, once the requests that
were running have been answered. Raises `EngineLostError` if the engine fails for good.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from sharpen import __version__
from sharpen.config.run import RunConfig
from sharpen.decide import decide_serving
from sharpen.errors import EngineLostError
from sharpen.execution.engines import load_policy, make_gateway
from sharpen.execution.model_files import quiet_transformers
from sharpen.execution.serving import ServingThread
from sharpen.gateway.caller import nobody
from sharpen.gateway.server import Server
from sharpen.interrupts import stop_signals
from sharpen.serve.front import Front, OneKey
from sharpen.serve.openapi import document

logger = logging.getLogger(__name__)
GRACE_S = 30.0
"""How long running requests may still take when the server ends."""


def serve(config: RunConfig, *, name: str, key: str, say: Callable[[str], None]) -> None:
    """Serve the model of `config` by `name` to whoever has the `key`.

    Raises `ConfigError` or `ModelError` for bad input, `EngineLostError` if the engine fails for good.
    """
    job = decide_serving(config)
    quiet_transformers()
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_signals())
        for line in job.notices:
            say(line)
        assert job.engine is not None
        say(job.engine.line)
        thread = ServingThread()
        stack.callback(thread.close)
        tokenizer, engine = load_policy(job.config, job.folder, thread, type=job.engine.type, alone=True)
        stack.callback(lambda: thread.call(engine.close(), timeout_s=30))
        model = job.config.model.model_copy(update={"model_path": name})
        gateway = make_gateway(model, engine, tokenizer, thread.loop, listen=config.gateway)
        stack.callback(lambda: thread.call(gateway.close(), timeout_s=10))
        front = Front(gateway, OneKey(gateway, key), key, document(__version__))
        server = Server(front.start, thread.loop, nobody, config.gateway)
        stack.callback(lambda: thread.call(server.stop(), timeout_s=30))
        say(f"serving {name} at {server.url()}  (context: {config.model.max_model_len} tokens; Ctrl-C ends)")
        wait(front, thread, say)


def wait(front: Front, thread: ServingThread, say: Callable[[str], None]) -> None:
    """Wait until the server is told to end, then until its requests have been answered. A second Ctrl-C ends it at
    once. Raises `EngineLostError` if the engine is lost first."""
    try:
        front.lost.wait()
    except KeyboardInterrupt:
        running = front.requests.running
        say(f"ending; waiting for {running} requests (at most {GRACE_S:g} s, or Ctrl-C again)" if running else "ending")
        thread.call(front.end(GRACE_S))
        return
    raise EngineLostError("the engine can serve no more requests: start the server again")
