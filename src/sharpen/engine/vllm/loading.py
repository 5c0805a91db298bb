"""Loads new weights into a running vLLM, by vLLM's own weight-transfer protocol, and chooses the way of transfer.

In: tensors under their Hugging Face names. Out: workers that compute with them. The ways:

| the tensors are                            | a worker receives them                                |
|--------------------------------------------|-------------------------------------------------------|
| on the worker's own GPU                    | through CUDA IPC handles (`engine.vllm.transfer`)  |
| on another GPU                             | by an NCCL broadcast (`engine.vllm.broadcast`)     |
| on the CPU, or if the trial of a way fails | from a file in memory (`engine.vllm.transfer`) |

The first two are tried once, before the first update. If one fails, all workers use the file, and a warning says why.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch

from sharpen.engine.vllm.broadcast import CHUNK_BYTES, BroadcastGroup, Layout, in_thread, lay_out, reason
from sharpen.engine.vllm.transfer import WeightsFile, only_gpu, pack, trial
from sharpen.errors import EngineError

logger = logging.getLogger(__name__)

JOIN_LIMIT_S = 60.0
"""The time limit of the NCCL trial."""
SEND_LIMIT_S = 600.0
"""The time limit of a broadcast."""

Way = Literal["ipc", "nccl"]


class Loader:
    """Moves weights into the workers of one `AsyncLLM`. Every method runs on one event loop."""

    def __init__(self, llm: Any, *, join_limit_s: float = JOIN_LIMIT_S, chunk_bytes: int = CHUNK_BYTES) -> None:
        """`llm` is a started `AsyncLLM`."""
        self._llm = llm
        self._dtype: torch.dtype = llm.model_config.dtype
        self._join_limit_s, self._chunk_bytes = join_limit_s, chunk_bytes
        self._file = WeightsFile()
        self._group: BroadcastGroup | None = None
        self.ways: list[Way] | None = None
        """The way of each worker, once tried; an empty list means the file."""

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load weights of all parameters while generation is paused, and drop all KV of older weights.

        After any exception vLLM can no longer be used.
        """
        gpu = self._source(tensors)
        if gpu is not None and self.ways is None:
            self.ways = await self._choose(gpu)
        ways = self.ways if gpu is not None and self.ways else []
        kept: Mapping[str, torch.Tensor] = {}  # tensors behind handles must stay alive until all workers have read them
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
        """Leave the workers' group and free the file. May be called twice, and during a broadcast."""
        if self._group is not None:
            self._group.close()
        self._file.close()

    def _source(self, tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
        """Return the GPU that workers may get the tensors from without the file, if any."""
        return only_gpu(tensors)

    async def _try_handles(self, gpu: torch.device) -> list[tuple[bool, str]]:
        """Return each worker's answer to a trial of IPC handles; see `engine.vllm.transfer.try_to_read`."""
        values = trial(gpu)  # kept alive until all workers have read it
        return list(await self._llm.collective_rpc("sharpen_try_to_read", args=(pack({"trial": values}),)))

    async def _choose(self, gpu: torch.device) -> list[Way]:
        """Try the ways and return that of each worker; an empty list if one fails."""
        answers = await self._try_handles(gpu)
        far = [number for number, (elsewhere, _) in enumerate(answers) if elsewhere]
        failed = max((why for elsewhere, why in answers if not elsewhere), default="")
        if failed:
            logger.warning("new weights travel through a file, not within the GPU: %s", failed)
        elif far and (failed := await self._join(gpu, far)):
            logger.warning("new weights travel through a file, not by NCCL between GPUs: %s", failed)
        return [] if failed else ["nccl" if number in far else "ipc" for number in range(len(answers))]

    async def _join(self, gpu: torch.device, far: list[int]) -> str:
        """Make a group with the workers `far` and try it. Return why that failed; empty if it did not."""
        limit_s = self._join_limit_s
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._group = group = BroadcastGroup(gpu, rank=0, size=1 + len(far), port=port)
        joined = in_thread(lambda: group.join(limit_s, listener))
        answers = await self._llm.collective_rpc("sharpen_join", args=(port, far, limit_s))
        reasons = {f"worker {number}": answer for number, answer in enumerate(answers) if answer}
        try:
            await asyncio.wait_for(asyncio.wrap_future(joined), limit_s)
        except Exception as error:  # of NCCL, the network or the time limit: the file is used instead
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
        """Let the workers receive their update while this side sends. If either fails, so does the other."""
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
