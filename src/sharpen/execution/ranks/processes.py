"""The ranks of a trainer as processes of this machine, one for each GPU, or several that share the CPU.

In: a `TrainerPlan` and a number of processes. Out: `Calls`. Each process is started afresh (`execution.ranks.main`), so
that it needs nothing of the user's script. Arguments are pickled once into a file that all processes share, their
arrays beside; weights come back through another. Small answers come through a socket, whose end tells either side that
the other one is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from sharpen.errors import RankError
from sharpen.execution.ranks.answers import GRACE_S, RankAnswer, RankCalls, Reply, what_of
from sharpen.execution.ranks.rank import WeightSpec
from sharpen.execution.ranks.shared_file import SharedFile
from sharpen.trainer.roles import TrainerPlan
from sharpen.trainer.team import TIMEOUT_S

_CLOSE_S = 10.0
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a rank: where it meets the others."""

    rank: int
    size: int
    rendezvous: str
    device: str
    num_threads: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A call: where in the shared file its pickle and the arrays that belong to it are (from, to)."""

    parts: tuple[tuple[int, int], ...]


class RankProcesses(RankCalls):
    """Satisfies `ranks.group.Calls`."""

    def __init__(
        self,
        plan: TrainerPlan,
        num_processes: int,
        *,
        on_gpus: bool,
        timeout_s: float = TIMEOUT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        """Start the processes; returns when all have loaded their models. Raises what they raise, or `RankError`."""
        super().__init__(grace_s)
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._layout: list[tuple[WeightSpec, int]] | None = None
        self._mapped: dict[str, torch.Tensor] = {}
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            folder = tempfile.TemporaryDirectory(prefix=f"sharpen-ranks-{os.getpid()}-")
            self._folder = Path(self._undo.enter_context(folder))
            self._letters, self._weights = SharedFile.create(), SharedFile.create()
            self._undo.callback(self._letters.close)
            self._undo.callback(self._weights.close)
            for rank in range(num_processes):
                self._launch(rank)
                start = Start(
                    rank=rank,
                    size=num_processes,
                    rendezvous=f"file://{self._folder / 'ranks'}",
                    device=f"cuda:{rank}" if on_gpus else "cpu",
                    num_threads=max(1, torch.get_num_threads() // num_processes),
                    timeout_s=timeout_s,
                )
                self._tell(rank, start)
            self._answers(self._connections, "start")
            self.load(plan)
            undo.pop_all()

    def load(self, plan: TrainerPlan) -> None:
        """Load the models of a plan, instead of those that are there. Raises as the constructor does."""
        self._layout = None
        self.call("load", plan)

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks, in their order."""
        return [process.pid for process in self._processes]

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """See `Calls.call`."""
        self._check_open()
        letter = self._write((method, arguments, named))
        for rank in range(len(self._processes)):
            self._tell(rank, letter)
        return self._answers(self._connections, what_of(method, arguments))

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Calls.weights`: the same memory each time."""
        if self._layout is None:
            self._layout, size = lay_out(self.call("weight_specs")[0])
            self._weights.grow(size)
            memory = self._weights.map()
            self._mapped = {spec.name: view(memory, spec, offset) for spec, offset in self._layout}
        self.call("give_weights", self._layout)
        return self._mapped

    def close(self) -> None:
        """See `Calls.close`."""
        for connection in self._connections:
            connection.close()  # a rank that is idle ends by this alone
        deadline = time.monotonic() + (_CLOSE_S if self._broken is None else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections.clear()
        self._broken = self._broken or RankError("the trainer is closed")
        self._undo.close()

    def _launch(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), self._letters.descriptor, self._weights.descriptor)
            environment = {**os.environ, "PYTHONPATH": _python_path()}
            if sys.platform == "linux":
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            process = subprocess.Popen(
                [sys.executable, "-m", "sharpen.execution.ranks.main", *map(str, inherited), str(self._folder)],
                pass_fds=inherited,
                process_group=0,  # a terminal's Ctrl-C is the coordinator's, which ends its step first
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                env=environment,
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))

    def _tell(self, rank: int, message: Start | Letter) -> None:
        with contextlib.suppress(OSError):  # a rank that is gone is noticed where its answer is waited for
            self._connections[rank].send(message)

    def _write(self, call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Letter:
        """Pickle a call into the shared file, arrays as they are."""
        buffers: list[pickle.PickleBuffer] = []
        content = pickle.dumps(call, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(content), *(buffer.raw() for buffer in buffers)]
        starts = [0, *accumulate(aligned(len(part)) for part in parts)]
        places = tuple((start, start + len(part)) for start, part in zip(starts, parts, strict=False))
        self._letters.grow(starts[-1])
        with self._letters.map() as memory:
            for (start, stop), part in zip(places, parts, strict=True):
                memory[start:stop] = part
        return Letter(parts=places)

    def _wait(self, handles: Sequence[Connection], timeout_s: float | None) -> Sequence[Any]:
        """See `RankCalls`."""
        return wait(handles, timeout_s)

    def _receive(self, rank: int, handle: Connection) -> Reply:
        """See `RankCalls`."""
        try:
            answer: RankAnswer = handle.recv()
        except (EOFError, OSError):
            return self._ending(rank)
        return answer

    def _ending(self, rank: int) -> str:
        """How a rank ended that gave no answer."""
        try:
            code = self._processes[rank].wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def lay_out(specs: list[WeightSpec]) -> tuple[list[tuple[WeightSpec, int]], int]:
    """Where each tensor is in one block of memory, in bytes, and the size of that."""
    found, offset = [], 0
    for spec in specs:
        found.append((spec, offset))
        offset += aligned(spec.num_bytes)
    return found, offset


def aligned(size: int) -> int:
    """The next larger size at which an array may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def view(memory: Any, spec: WeightSpec, offset: int) -> torch.Tensor:
    """The tensor that lies there."""
    count = spec.num_bytes // spec.dtype.itemsize
    return torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset).view(spec.shape)


def _python_path() -> str:
    """So that the ranks find this package, wherever this process has found it."""
    here = str(Path(__file__).parents[3])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


def _has_descriptor(stream: Any) -> bool:
    """Whether it is a real file: in a notebook it may not be."""
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
