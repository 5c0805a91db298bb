"""Broadcast of new weights from the trainer's GPU to vLLM's workers on other GPUs of this machine, by NCCL.

In: tensors on the trainer's device (rank 0 of a group), or their layout (workers, rank 1 and up). Out: the same tensors
on the workers. A group begins with a trial broadcast whose values each worker checks, since drivers, containers and
libraries may not allow it. Between CPUs gloo is used, so that tests without GPUs cover all of this.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch

from sharpen.engine.vllm.transfer import TRIAL

CHUNK_BYTES = 2**28
"""Tensors are sent together up to this size; larger ones are sent separately."""
_HOST = "127.0.0.1"

Layout = Sequence[Sequence[tuple[str, Sequence[int]]]]
"""The names and shapes of the tensors to send, in order; each inner list is sent as one chunk."""
Result = TypeVar("Result")


class BroadcastGroup:
    """One member of a group of a trainer and the workers that it broadcasts to."""

    def __init__(self, device: torch.device, *, rank: int, size: int, port: int) -> None:
        """`device` is this member's own GPU; NCCL does not allow two members on one GPU."""
        self._device, self._rank, self._size, self._port = device, rank, size, port
        self._communicator: Any = None
        self._stream: Any = None
        self._closed = False

    def join(self, limit_s: float, listener: socket.socket | None = None) -> None:
        """Connect to the other members at the port, where the trainer's `listener` listens, and run the trial.

        Blocks until then; `close` from another thread ends it. Raises `RuntimeError` if the members do not connect in
        time, or the trial's values arrive changed.
        """
        from vllm.distributed.utils import StatelessProcessGroup

        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        limit = math.ceil(limit_s)
        met = StatelessProcessGroup.create(
            _HOST, self._port, self._rank, self._size, store_timeout=limit, listen_socket=listener
        )
        self._communicator = _COMMUNICATORS[self._device.type](met, self._device, limit_s)
        if self._closed:
            self.close()
            raise RuntimeError("the other members connected too late")
        with self._own_stream():
            values = torch.tensor(TRIAL if self._rank == 0 else [0.0] * len(TRIAL), device=self._device)
            self._broadcast(values)
            received = tuple(values.tolist())
        if received != TRIAL:
            raise RuntimeError(f"{received} arrived where {TRIAL} was sent")

    def send(self, tensors: Mapping[str, torch.Tensor], layout: Layout, dtype: torch.dtype) -> None:
        """Send tensors, converted to `dtype`. When this returns they are sent, and may change."""
        with self._own_stream():
            for chunk in layout:
                self._broadcast(torch.cat([tensors[name].detach().to(dtype).flatten() for name, _ in chunk]))

    def receive(self, layout: Layout, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive the tensors that the trainer sends, and yield them one by one."""
        for chunk in layout:
            sizes = [math.prod(shape) for _, shape in chunk]
            packed = torch.empty(sum(sizes), dtype=dtype, device=self._device)
            self._broadcast(packed)
            for (name, shape), tensor in zip(chunk, torch.split(packed, sizes), strict=True):
                yield name, tensor.view(list(shape))

    def close(self) -> None:
        """Leave the group and end any transfer in progress. May be called twice."""
        self._closed = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if (communicator := self._communicator) is None:
            raise RuntimeError("the broadcast group is closed")
        stream = torch.cuda.current_stream(self._device) if tensor.is_cuda else None
        communicator.broadcast(tensor, src=0, stream=stream)

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Wait for earlier work on the GPU, then run the block on a separate stream and wait for that."""
        if self._stream is None:
            yield
            return
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def lay_out(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES
) -> list[list[tuple[str, list[int]]]]:
    """Divide tensors into chunks of at most `chunk_bytes` in `dtype`; see `Layout`."""
    chunks: list[list[tuple[str, list[int]]]] = []
    room = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * dtype.itemsize
        if size > room or not chunks:
            chunks.append([])
            room = chunk_bytes
        chunks[-1].append((name, list(tensor.shape)))
        room -= size
    return chunks


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run a function in a daemon thread, since NCCL may never return."""
    promise: Future[Result] = Future()

    def run() -> None:
        promise.set_running_or_notify_cancel()
        try:
            promise.set_result(work())
        except BaseException as error:
            promise.set_exception(error)

    threading.Thread(target=run, name="sharpen-broadcast", daemon=True).start()
    return promise


def reason(error: Exception) -> str:
    """Return an error's message in one line."""
    if isinstance(error, TimeoutError):
        return "it timed out"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _nccl(met: Any, device: torch.device, limit_s: float) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():
        communicator = PyNcclCommunicator(met, device=device)
    if communicator.disabled:
        raise RuntimeError("vLLM cannot find the NCCL library, or VLLM_DISABLE_PYNCCL is set")
    return communicator


class _Gloo:
    """A communicator between CPUs, with the methods of vLLM's `PyNcclCommunicator` that are used here."""

    def __init__(self, met: Any, device: torch.device, limit_s: float) -> None:
        from torch import distributed

        kind: Any = distributed.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=_HOST)]
        options._timeout = timedelta(seconds=limit_s)
        self._met = met  # kept alive: other members may still be connecting through it
        self._group = kind(met.store, met.rank, met.world_size, options)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: None) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group.abort()


_COMMUNICATORS: Mapping[str, Callable[[Any, torch.device, float], Any]] = {"cuda": _nccl, "cpu": _Gloo}
