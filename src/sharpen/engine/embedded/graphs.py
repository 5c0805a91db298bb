"""CUDA graphs for steps that only decode: all kernels of a forward pass are launched at once.

In: a `StepBatch` of decode rows. Out: logits of all its rows. Without a graph, a small model's step is bound by kernel
launches (about 25 per layer), not by memory reads. A graph is recorded for a shape (rows, KV length, adapters) when it
occurs for the second time, with the inputs in static buffers. KV lengths are rounded up by at most a quarter, to have
few shapes.

A graph reads weights and KV at fixed addresses. Weights are copied in place, so a load keeps graphs valid (this is
checked). If the KV pool is reallocated, or weights have moved, all graphs are dropped. If a recording fails, graphs are
turned off, with the reason in `off`.

Shape suffixes: N rows of the step, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch

from sharpen.engine.embedded.attention import SlotAttention
from sharpen.engine.embedded.batch import StepBatch
from sharpen.engine.embedded.beside import Adapters, Span
from sharpen.engine.embedded.forward import Forward
from sharpen.engine.embedded.kv import LENGTH_BUCKET, KVPool

MAX_GRAPHS = 96
"""How many graphs are kept, since each costs some MB of driver memory. The least recently used is dropped first."""

Shape = tuple[int, int, Span]
"""Rows, KV length, and the adapters that are computed."""


class Recorder(Protocol):
    """Records the kernels that a function launches."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record `run`; return a function that replays it, and the tensor that each replay writes its result to."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, which is safe because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Run once on a separate stream, so that libraries initialize themselves, then record."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            run()
            # A trainer in another thread may allocate memory during the recording; only this thread must not.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay, result


class _Graph:
    """The graph of one shape, with its static inputs."""

    def __init__(
        self,
        record: Recorder,
        forward: Forward,
        pool: KVPool,
        shape: Shape,
        device: torch.device,
        adapters: Adapters | None,
    ) -> None:
        num_rows, kv_length, span = shape
        self._inputs_4N = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        self._inputs_4N[2] = pool.scratch  # the recording writes its KV there
        token_N, position_N, slot_N, adapter_N = self._inputs_4N
        rows_N = torch.arange(num_rows, device=device)

        def run() -> torch.Tensor:
            attention = SlotAttention(
                pool, slot_N=slot_N, position_N=position_N, num_decode=num_rows, kv_length=kv_length, segments=()
            )
            if adapters is None:
                return forward.logits(token_N, position_N, attention, rows_N)
            with adapters.computing(adapters.fixed(adapter_N, span)):
                return forward.logits(token_N, position_N, attention, rows_N)

        self._replay, self._logits_NV = record(run)

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Replay the graph and return the logits, which the next replay of any graph overwrites."""
        inputs_4N = torch.from_numpy(np.stack([batch.token_N, batch.position_N, batch.slot_N, batch.adapter_N]))
        if self._inputs_4N.is_cuda:
            inputs_4N = inputs_4N.pin_memory()
        self._inputs_4N.copy_(inputs_4N, non_blocking=True)
        self._replay()
        return self._logits_NV


class DecodeGraphs:
    """The graphs of one model and KV pool."""

    def __init__(
        self,
        *,
        forward: Forward,
        pool: KVPool,
        parameters: Callable[[], Iterable[torch.Tensor]],
        device: torch.device,
        record: Recorder,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        """`parameters` returns the tensors that the forward pass reads; at most `max_graphs` are kept."""
        self.off = ""
        self.adapters: Adapters | None = None
        """The adapters by name, if the engine serves some."""
        self.replays = 0
        self._forward = forward
        self._pool = pool
        self._parameters = parameters
        self._device = device
        self._record = record
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Shape, _Graph] = OrderedDict()
        self._occurrences: Counter[Shape] = Counter()
        self._allocation = pool.allocation
        self._addresses = self._current_addresses()

    def logits(self, batch: StepBatch) -> torch.Tensor | None:
        """Return the logits of all rows (shape NV, valid until the next call), or None if the step has no graph and
        must be computed eagerly."""
        if self.off or batch.segments or not batch.num_decode or batch.num_decode != len(batch.token_N):
            return None
        if self._allocation != self._pool.allocation:
            self._drop()
            self._allocation = self._pool.allocation
        span = (0, 0) if self.adapters is None else self.adapters.span(batch.adapter_N)
        shape = (batch.num_decode, rounded_length(batch.kv_length, self._pool.length), span)
        graph = self._graphs.get(shape)
        if graph is None:
            self._occurrences[shape] += 1
            if self._occurrences[shape] < 2:
                return None
            graph = self._record_graph(shape)
            if graph is None:
                return None
        self._graphs.move_to_end(shape)
        self.replays += 1
        return graph.logits(batch)

    def _record_graph(self, shape: Shape) -> _Graph | None:
        if len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        try:
            self._graphs[shape] = _Graph(self._record, self._forward, self._pool, shape, self._device, self.adapters)
        except RuntimeError as error:  # raised by CUDA and its libraries if something cannot be recorded
            self._drop()
            self.off = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            warnings.warn(f"decoding without CUDA graphs, since recording one failed: {self.off}", stacklevel=2)
            return None
        return self._graphs[shape]

    def check_addresses(self) -> None:
        """Drop all graphs if the weights have moved. Called after each load."""
        if (addresses := self._current_addresses()) != self._addresses:
            self._drop()
            self._addresses = addresses

    def release(self) -> None:
        """Drop all references to the weights and graphs. No step may follow."""
        self._drop()
        del self._forward, self._parameters, self.adapters

    def _current_addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._parameters())

    def _drop(self) -> None:
        self._graphs.clear()
        self._occurrences.clear()


def rounded_length(kv_length: int, longest: int) -> int:
    """Round a KV length up to a multiple of a quarter of the power of two below it, at most `longest`."""
    step = max(LENGTH_BUCKET, (1 << (kv_length - 1).bit_length()) // 8)
    return min(-(-kv_length // step) * step, longest)
