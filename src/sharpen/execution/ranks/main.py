"""What a rank's process of `execution.ranks.processes` runs.

In: inherited descriptors (a socket to the coordinator, the shared file of its calls, that of the weights), and the
folder in which the ranks meet. Out: an answer for each call. It ends when the socket does, whatever it is doing then.
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

from sharpen.execution.model_files import quiet_transformers
from sharpen.execution.ranks.answers import answer_of
from sharpen.execution.ranks.processes import Letter, Start, view
from sharpen.execution.ranks.rank import RankTrainer, WeightSpec
from sharpen.execution.ranks.shared_file import SharedFile
from sharpen.trainer.roles import TrainerPlan
from sharpen.trainer.team import Ranks


def main() -> None:
    """Serve the coordinator until it closes the socket. SIGTERM and SIGHUP, which the end of a job or of a terminal
    sends to every process, are the coordinator's to answer: it saves a checkpoint with this rank's help."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    socket, letters, weights = map(int, sys.argv[1:4])
    watch = threading.Thread(target=_end_with_coordinator, args=(socket, os.getppid(), sys.argv[4]), daemon=True)
    watch.start()
    connection = Connection(socket)
    with contextlib.suppress(EOFError, ConnectionError):  # the coordinator has closed it
        rank = _Rank(connection.recv(), SharedFile(letters), SharedFile(weights))
        connection.send(answer_of(rank.meet))
        while True:
            letter: Letter = connection.recv()
            connection.send(answer_of(rank.serve, letter))
    watch.join()


class _Rank:
    """One `RankTrainer` and the memory that it shares with the coordinator."""

    def __init__(self, start: Start, letters: SharedFile, weights: SharedFile) -> None:
        self._start = start
        self._letters = letters
        self._weights = weights
        self._trainer: RankTrainer | None = None
        self._places: dict[str, torch.Tensor] = {}

    def meet(self) -> None:
        """Meet the other ranks."""
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

    def serve(self, letter: Letter) -> Any:
        """Make the call that a letter holds."""
        memory = memoryview(self._letters.map(private=True))
        content, *buffers = [memory[start:stop] for start, stop in letter.parts]
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
        if not self._places:  # mapped once: a new mapping would cost as much as the copies
            memory = self._weights.map()
            self._places = {spec.name: view(memory, spec, offset) for spec, offset in layout}

        def take(name: str, tensor: torch.Tensor) -> None:
            self._places[name].copy_(tensor)

        trainer.give_weights(take)


def _end_with_coordinator(socket: int, parent: int, folder: str) -> None:
    """End this process at once when the coordinator has closed the socket or is gone, in the midst of a call too. One
    that was killed has left the folder."""
    hung_up = select.poll()
    hung_up.register(socket, 0)
    while not hung_up.poll(1000) and os.getppid() == parent:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
