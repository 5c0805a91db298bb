"""Run directories in every state that a page may meet, and a server over them.

Out: `make_states` makes them; `Served` serves them until it is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import uvicorn
from shop_runs import Maker, RunSize, make_run, train
from starlette.types import ASGIApp

from sharpen.learning.experience.journal import Journal
from sharpen.show.monitor.metrics import JsonlSink
from sharpen.show.view.library import Library
from sharpen.show.view.server import make_app

TOKEN = "a-token"
HOSTILE = (
    "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
    "<style>body { display: none }</style>{{ 7 * 7 }} \x1b[31mred\x1b[0m <b>bold</b>"
)
"""What an agent may say, and no page may take for more than text."""
SIZE = RunSize(steps=6, batch_size=4, group_size=4)
HUGE = RunSize(steps=120, batch_size=4, group_size=4, tasks=150, held_out=120, evaluations=(60,), words=120)


def make_states(folder: Path) -> Path:
    """Make a run in each state: `whole`, `other` (to compare with), `live`, `huge`, `empty`, `broken`."""
    said = {f"step-{step}/train/{task}/{index}": HOSTILE for step in range(6) for task in range(12) for index in (0, 1)}
    make_run(folder / "whole", Maker(size=SIZE, said=said))
    make_run(folder / "other", Maker(size=SIZE, seed=1, learns=False))
    make_run(folder / "live", Maker(size=SIZE), until=3, ended=False)
    hold(folder / "live")
    make_run(folder / "huge", Maker(size=HUGE))
    (folder / "empty").mkdir()
    (folder / "empty" / "metrics.jsonl").touch()
    broken = make_run(folder / "broken", Maker(size=SIZE))
    for name, content in (("metrics.jsonl", '{"step": 1, "reward/me\nnot json\n'), ("summary.json", '{"verdict": ')):
        (broken / name).write_text(content)
    (broken / "certificate.json").write_text("[]")
    journal = (broken / "run.db").read_bytes()
    (broken / "run.db").write_bytes(journal[: len(journal) // 2])
    return folder


def hold(run: Path) -> None:
    """Let a run look as if this process were at work on it."""
    (run / "run.lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))


def train_on(run: Path, step: int) -> None:
    """Add a step to a run."""
    with closing(JsonlSink(run / "metrics.jsonl", step - 1)) as metrics, Journal(run / "run.db") as journal:
        train(Maker(size=SIZE), journal, metrics, step)


class Served:
    """A server over some runs: its address, and the keys of the runs by name."""

    def __init__(self, library: Library, address: str) -> None:
        self.address = address
        self.keys = {folder.name: folder.key for folder in library.folders()}


@contextlib.contextmanager
def serving(folder: Path, cache: Path) -> Iterator[Served]:
    """Serve the runs below a folder, with all their rollouts read."""
    with closing(Library([folder], cache)) as library:

        def make(token: str, port: int, ending: Callable[[], bool]) -> ASGIApp:
            return make_app(library, token=token, port=port, ending=ending)

        with listening(make) as address:
            for run in library.folders():
                while run.name != "broken" and not library.index(run, wait_s=5.0).state().complete:
                    time.sleep(0.05)
            yield Served(library, address)


@contextlib.contextmanager
def listening(make: Callable[[str, int, Callable[[], bool]], ASGIApp]) -> Iterator[str]:
    """Serve an application, made as for `serve_app`; yields its address."""
    ending = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with listener:
        config = uvicorn.Config(
            make(TOKEN, port, ending.is_set),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            ending.set()
            server.should_exit = True
            thread.join()
