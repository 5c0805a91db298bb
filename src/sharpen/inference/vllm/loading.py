"""New weights into a running vLLM, by vLLM's own weight-transfer protocol, and the choice of the way that they take.

In: tensors under their Hugging Face names. Out: workers that compute with them. The ways:

| the tensors are                                | a worker gets them                                              |
|------------------------------------------------|-----------------------------------------------------------------|
| on the GPU that the worker computes on         | there itself, by CUDA's IPC handles (`inference.vllm.transfer`) |
| on another GPU                                 | by a broadcast of NCCL (`inference.vllm.broadcast`)             |
| on the CPU, or where the trial of a way failed | from a file in memory (`inference.vllm.weights_file`)           |

The first two are tried once, before the first update; if one fails, all workers take the file, and a line says why.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch

from sharpen.errors import EngineError
from sharpen.inference.vllm.broadcast import CHUNK_BYTES, BroadcastGroup, Layout, in_thread, lay_out, reason
from sharpen.inference.vllm.transfer import only_gpu, pack, trial
from sharpen.inference.vllm.weights_file import WeightsFile

logger = logging.getLogger(__name__)

JOIN_LIMIT_S = 60.0
"""After so long a trial of NCCL has failed."""
SEND_LIMIT_S = 600.0
"""After so long a broadcast will not end any more."""

Way = Literal["ipc", "nccl"]


class Loader:
    """Moves weights into the workers of one `AsyncLLM`. Every method runs on one event loop."""

    def __init__(self, llm: Any, *, join_limit_s: float = JOIN_LIMIT_S, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Of a started `AsyncLLM`."""
        self._llm = llm
        self._dtype: torch.dtype = llm.model_config.dtype
        self._join_limit_s, self._chunk_bytes = join_limit_s, chunk_bytes
        self._file = WeightsFile()
        self._group: BroadcastGroup | None = None
        self.ways: list[Way] | None = None
        """That of each worker, once they were tried; none: the file."""

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load weights of all parameters while generation is paused; no KV of older ones survives. Raises whatever goes
        wrong: vLLM is of no use then."""
        gpu = self._source(tensors)
        if gpu is not None and self.ways is None:
            self.ways = await self._choose(gpu)
        ways = self.ways if gpu is not None and self.ways else []
        kept: Mapping[str, torch.Tensor] = {}  # what handles lead to is there until all have read it
        if "ipc" in ways:
            kept = {name: tensor.detach().to(self._dtype).contiguous() for name, tensor in tensors.items()}
        handles = pack(kept) if kept else ""
        layout = lay_out(tensors, self._dtype, self._chunk_bytes) if "nccl" in ways else []
        update: Any = [{"handles": handles} if way == "ipc" else {"layout": layout} for way in ways]
        update = update or {"path": str(self._file.write(tensors, self._dtype))}
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.start_weight_update()
        await self._receive(update, partial(self._send, tensors, layout) if layout else None)
        await self._llm.finish_weight_update(str(version))
        await self._llm.resume_generation()

    def close(self) -> None:
        """Leave the workers' group and free the file. May be called twice, and while a broadcast is under way."""
        if self._group is not None:
            self._group.close()
        self._file.close()

    def _source(self, tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
        """From where workers may get them without the file."""
        return only_gpu(tensors)

    async def _look(self, gpu: torch.device) -> list[tuple[bool, str]]:
        """What each worker says of a trial; see `inference.vllm.transfer.try_to_read`."""
        tried = trial(gpu)  # it must be there until all have read it
        return list(await self._llm.collective_rpc("sharpen_try_to_read", args=(pack({"trial": tried}),)))

    async def _choose(self, gpu: torch.device) -> list[Way]:
        """The way of each worker, each tried; none if one fails."""
        looks = await self._look(gpu)
        far = [number for number, (elsewhere, _) in enumerate(looks) if elsewhere]
        failed = max((why for elsewhere, why in looks if not elsewhere), default="")
        if failed:
            logger.warning("new weights travel through a file, not within the GPU: %s", failed)
        elif far and (failed := await self._join(gpu, far)):
            logger.warning("new weights travel through a file, not by NCCL between GPUs: %s", failed)
        return [] if failed else ["nccl" if number in far else "ipc" for number in range(len(looks))]

    async def _join(self, gpu: torch.device, far: list[int]) -> str:
        """Make a group with these workers and try it; why that failed, empty if it did not."""
        limit_s = self._join_limit_s
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._group = group = BroadcastGroup(gpu, rank=0, size=1 + len(far), port=port)
        joined = in_thread(lambda: group.join(limit_s, listener))
        answers = await self._llm.collective_rpc("sharpen_join", args=(port, far, limit_s))
        reasons = {f"worker {number}": answer for number, answer in enumerate(answers) if answer}
        try:
            await asyncio.wait_for(asyncio.wrap_future(joined), limit_s)
        except Exception as error:  # of NCCL, of the network, of the time: the file does
            reasons["the trainer"] = reason(error)
        if reasons:
            self._group = None
            await asyncio.wrap_future(in_thread(group.close))
            await self._llm.shutdown_weight_transfer_engine()
        return "; ".join(f"{who}: {why}" for who, why in reasons.items())

    def _send(self, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
        assert self._group is not None
        self._group.send(tensors, layout, self._dtype)

    async def _receive(self, update: Any, send: Callable[[], None] | None) -> None:
        """Let the workers take their update while this side sends. If either fails, so does the other."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        received = self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        if send is None:
            await received
            return
        try:
            async with asyncio.timeout(SEND_LIMIT_S):
                await asyncio.gather(received, asyncio.wrap_future(in_thread(send)))
        except BaseException as error:
            assert self._group is not None
            in_thread(self._group.close)
            if isinstance(error, TimeoutError):
                raise EngineError(f"a broadcast did not end within {SEND_LIMIT_S:g} s") from error
            raise
