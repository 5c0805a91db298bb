"""vLLM's processes in tests: they go on from one that has imported vLLM, and compute with one thread.

In: the environment, whose variable `FORKED` says so. Out: `fork_processes` has this process, and those that go on from
the one that has imported vLLM, start its core and workers there; each has the environment in which it was made.

For users each of an engine's processes imports torch, transformers and vLLM anew, one after the other: 16 of the 20
seconds of a start. What they compute, are told and leave is the same. Without the variable they are started as for
users; so are those of programs and of Ray's workers.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

FORKED = "SHARPEN_TESTS_VLLM_FORKED"
IMPORTED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm_forked",  # as the last: the core starts the workers
]


class Forked(ForkServerProcess):
    """A process in the environment in which it was made. Its own go on from the same one."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        server = forkserver._forkserver
        server.ensure_running()
        self._environment, self._address = dict(os.environ), server._forkserver_address

    def run(self) -> None:
        import torch

        server = forkserver._forkserver
        server._forkserver_address, server.ensure_running = self._address, resource_tracker.ensure_running
        os.environ.clear()
        os.environ.update(self._environment)
        tempfile.tempdir = None  # where it is says the environment
        torch.set_num_threads(1)
        super().run()


class Forking(ForkServerContext):
    """What vLLM takes from `multiprocessing`."""

    Process = Forked


def context() -> Any:
    if FORKED not in os.environ:
        return multiprocessing.get_context("spawn")
    forking = Forking()
    forking.set_forkserver_preload(IMPORTED)
    return forking


def fork_processes() -> None:
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    os.environ[FORKED] = "1"
    for module in (utils, multiproc_executor):
        module.get_mp_context = context


if FORKED in os.environ:  # in the process that has imported vLLM
    import setproctitle

    setproctitle.getproctitle()  # it looks where titles are, which it would not find in another environment
    tempfile.tempdir = None
    fork_processes()
