"""The main program of a rank's process, started by `placement.ranks.processes`.

In: inherited descriptors (a socket to the coordinator, the shared files of its calls and of the weights), and the
ranks' rendezvous folder. Out: an answer for each call. The process ends when the socket is closed, even during a call.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.team import Ranks
from sharpen.models.files import quiet_transformers
from sharpen.placement.ranks.answers import run_call
from sharpen.placement.ranks.processes import CallMessage, SharedFile, Start, view
from sharpen.placement.ranks.rank import RankTrainer, WeightSpec


def main() -> None:
    """Serve the coordinator until it closes the socket. Ignore SIGTERM and SIGHUP, which the end of a job or a terminal
    sends to every process: the coordinator handles them and needs this rank to save a checkpoint."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    socket, calls, weights = map(int, sys.argv[1:4])
    watch = threading.Thread(target=_end_with_coordinator, args=(socket, os.getppid(), sys.argv[4]), daemon=True)
    watch.start()
    connection = Connection(socket)
    with contextlib.suppress(EOFError, ConnectionError):  # the coordinator has closed it
        rank = _Rank(connection.recv(), SharedFile(calls), SharedFile(weights))
        connection.send(run_call(rank.join))
        while True:
            message: CallMessage = connection.recv()
            connection.send(run_call(rank.serve, message))
    watch.join()


class _Rank:
    """A `RankTrainer` and the memory that it shares with the coordinator."""

    def __init__(self, start: Start, calls: SharedFile, weights: SharedFile) -> None:
        self._start = start
        self._calls = calls
        self._weights = weights
        self._trainer: RankTrainer | None = None
        self._places: dict[str, torch.Tensor] = {}

    def join(self) -> None:
        """Join the other ranks."""
        start = self._start
        torch.set_num_threads(start.num_threads)
        quiet_transformers()
        self._ranks = Ranks(
            rank=start.rank,
            size=start.size,
            rendezvous=start.rendezvous,
            device=torch.device(start.device),
            timeout_s=start.timeout_s,
        )

    def serve(self, message: CallMessage) -> Any:
        """Run the call that a message describes."""
        memory = memoryview(self._calls.map(private=True))
        content, *buffers = [memory[start:stop] for start, stop in message.parts]
        method, arguments, named = pickle.loads(content, buffers=buffers)
        if method == "load":
            return self._load(*arguments)
        assert self._trainer is not None
        if method == "give_weights":
            return self._give_weights(self._trainer, *arguments)
        return getattr(self._trainer, method)(*arguments, **named)

    def _load(self, plan: TrainerPlan) -> None:
        self._places = {}
        self._trainer = RankTrainer(plan, self._ranks)

    def _give_weights(self, trainer: RankTrainer, layout: list[tuple[WeightSpec, int]]) -> None:
        if not self._places:  # mapped once: a new mapping costs as much as the copies
            memory = self._weights.map()
            self._places = {spec.name: view(memory, spec, offset) for spec, offset in layout}

        def take(name: str, tensor: torch.Tensor) -> None:
            self._places[name].copy_(tensor)

        trainer.give_weights(take)


def _end_with_coordinator(socket: int, parent: int, folder: str) -> None:
    """End this process at once when the coordinator closes the socket or dies, even during a call. Remove the folder,
    which a killed coordinator leaves behind."""
    hangup = select.poll()
    hangup.register(socket, 0)
    while not hangup.poll(1000) and os.getppid() == parent:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
