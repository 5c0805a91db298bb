"""The ranks of a trainer as processes of this machine, one for each GPU, or several that share the CPU.

In: a `TrainerPlan` and a number of processes. Out: `Calls`. Each process is a new Python (`placement.ranks.main`) that
does not import the user's script. Arguments are pickled once into a file that all processes share, with their arrays as
raw bytes; weights come back through another file. Small answers come through a socket, which also tells each side when
the other is gone.
"""

from __future__ import annotations

import contextlib
import mmap
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
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.team import TIMEOUT_S
from sharpen.machine import filling_gaps, python_path
from sharpen.placement.ranks.answers import GRACE_S, RankAnswer, RankCalls, Reply, call_name
from sharpen.placement.ranks.rank import WeightSpec


class SharedFile:
    """An unnamed file that can grow. A mapping covers the size at the time it was made."""

    def __init__(self, descriptor: int) -> None:
        """Wrap an inherited descriptor."""
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> SharedFile:
        """Create an empty file: in memory on Linux (not limited by a container's /dev/shm), else on disk."""
        if sys.platform == "linux":
            return cls(os.memfd_create("sharpen"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def grow(self, size: int) -> None:
        """Extend the file to at least `size` bytes. Existing mappings stay valid, and memory is allocated on
        writing."""
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)

    def map(self, *, private: bool = False) -> mmap.mmap:
        """Map the file. Writes to a `private` mapping are not seen by other processes."""
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        return mmap.mmap(self.descriptor, 0, access=access)

    def close(self) -> None:
        """Close the descriptor; mappings stay valid."""
        os.close(self.descriptor)


_CLOSE_S = 10.0
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a rank: how it joins the others."""

    rank: int
    size: int
    rendezvous: str
    device: str
    num_threads: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMessage:
    """A call: the byte ranges (start, stop) of its pickle and its arrays in the shared file."""

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
        """Start the processes and wait until all have loaded their models. Raises what they raise, or `RankError`."""
        super().__init__(grace_s)
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._layout: list[tuple[WeightSpec, int]] | None = None
        self._mapped: dict[str, torch.Tensor] = {}
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            folder = tempfile.TemporaryDirectory(prefix=f"sharpen-ranks-{os.getpid()}-")
            self._folder = Path(self._resources.enter_context(folder))
            self._calls, self._weights = SharedFile.create(), SharedFile.create()
            self._resources.callback(self._calls.close)
            self._resources.callback(self._weights.close)
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
                self._send(rank, start)
            self._answers(self._connections, "start")
            self.load(plan)
            undo.pop_all()

    def load(self, plan: TrainerPlan) -> None:
        """Load the models of a plan in place of the current ones. Raises as the constructor does."""
        self._layout = None
        self.call("load", plan)

    @property
    def process_ids(self) -> list[int]:
        """The process ids, in rank order."""
        return [process.pid for process in self._processes]

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """See `Calls.call`."""
        self._check_open()
        message = self._write((method, arguments, named))
        for rank in range(len(self._processes)):
            self._send(rank, message)
        return self._answers(self._connections, call_name(method, arguments))

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
            connection.close()  # this alone ends an idle rank
        deadline = time.monotonic() + (_CLOSE_S if self._broken is None else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections.clear()
        self._broken = self._broken or RankError("the trainer is closed")
        self._resources.close()

    def _launch(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), self._calls.descriptor, self._weights.descriptor)
            environment = filling_gaps(os.environ) | {"PYTHONPATH": python_path()}
            if sys.platform == "linux":
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            process = subprocess.Popen(
                [sys.executable, "-m", "sharpen.placement.ranks.main", *map(str, inherited), str(self._folder)],
                pass_fds=inherited,
                process_group=0,  # a terminal's Ctrl-C goes to the coordinator only, which finishes its step first
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                env=environment,
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))

    def _send(self, rank: int, message: Start | CallMessage) -> None:
        with contextlib.suppress(OSError):  # a lost rank is noticed when its answer is awaited
            self._connections[rank].send(message)

    def _write(self, call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> CallMessage:
        """Write a call into the shared file: its pickle and, outside the pickle, its arrays."""
        buffers: list[pickle.PickleBuffer] = []
        content = pickle.dumps(call, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(content), *(buffer.raw() for buffer in buffers)]
        starts = [0, *accumulate(aligned(len(part)) for part in parts)]
        places = tuple((start, start + len(part)) for start, part in zip(starts, parts, strict=False))
        self._calls.grow(starts[-1])
        with self._calls.map() as memory:
            for (start, stop), part in zip(places, parts, strict=True):
                memory[start:stop] = part
        return CallMessage(parts=places)

    def _wait(self, handles: Sequence[Connection], timeout_s: float | None) -> Sequence[Any]:
        """See `RankCalls`."""
        return wait(handles, timeout_s)

    def _receive(self, rank: int, handle: Connection) -> Reply:
        """See `RankCalls`."""
        try:
            answer: RankAnswer = handle.recv()
        except (EOFError, OSError):
            return self._describe_end(rank)
        return answer

    def _describe_end(self, rank: int) -> str:
        """Describe how a rank ended that gave no answer."""
        try:
            code = self._processes[rank].wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def lay_out(specs: list[WeightSpec]) -> tuple[list[tuple[WeightSpec, int]], int]:
    """Return the byte offset of each tensor in one block of memory, and the size of the block."""
    layout, offset = [], 0
    for spec in specs:
        layout.append((spec, offset))
        offset += aligned(spec.num_bytes)
    return layout, offset


def aligned(size: int) -> int:
    """Round a size up to the alignment of arrays."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def view(memory: Any, spec: WeightSpec, offset: int) -> torch.Tensor:
    """Return the tensor at an offset, without a copy."""
    count = spec.num_bytes // spec.dtype.itemsize
    return torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset).view(spec.shape)


def _has_descriptor(stream: Any) -> bool:
    """Whether the stream is a real file. In a notebook it may not be."""
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
