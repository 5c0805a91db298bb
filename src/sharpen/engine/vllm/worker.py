"""Code that runs in vLLM's worker processes: it prepares the model, loads new weights, and ends the processes with
their owner.

In: the place or layout of new weights, through vLLM's own weight-transfer protocol (start, update, finish), and the
owner's process id in the environment. Out: the worker's model changed in place. vLLM imports this module in each worker
because `engine.vllm.start` names `WorkerExtension` as its extension. The import registers the transfer backend,
since the worker creates it right afterwards.
"""

from __future__ import annotations

import functools
import os
import select
import shutil
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from sharpen.engine.vllm.broadcast import BroadcastGroup, Layout, in_thread, reason
from sharpen.engine.vllm.experts import return_experts
from sharpen.engine.vllm.start import BACKEND, FOLDER_VARIABLE, OWNER_VARIABLE
from sharpen.engine.vllm.transfer import map_file, try_to_read, unpack


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """No settings: the transfer needs no initialization."""


@dataclass
class WeightsUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """How to get every parameter under its Hugging Face name: the path of a file (`engine.vllm.transfer`),
    handles to this GPU's memory (`engine.vllm.transfer`), or the layout of the trainer's broadcast
    (`engine.vllm.broadcast`)."""

    path: str = ""
    handles: str = ""
    layout: Layout = field(default_factory=list)


@functools.lru_cache(maxsize=1)
def _map_file(path: str) -> dict[str, torch.Tensor]:
    return map_file(Path(path))


class Transfer(WeightTransferEngine[NoInit, WeightsUpdate]):  # type: ignore[misc]
    """Loads new weights from a file in memory, from the GPU's own memory, or from a broadcast."""

    init_info_cls = NoInit
    update_info_cls = WeightsUpdate
    group: BroadcastGroup | None = None

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: `WorkerExtension.sharpen_join` connects, since it can report why it failed."""

    def start_weight_update(self) -> None:
        """Restore the layers' checkpoint shapes, so that weights can be loaded into packed layers."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like vLLM's own method, without its wait for an accelerator (a CPU has none; copies from a file wait)."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightsUpdate) -> None:
        """Load all parameters. The file is the same in each update."""
        if update_info.handles:
            self.model.load_weights(unpack(update_info.handles, self.device))
        elif update_info.layout:
            assert self.group is not None
            self.model.load_weights(self.group.receive(update_info.layout, self.model_config.dtype))
        else:
            self.model.load_weights(_map_file(update_info.path).items())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_weight_update(self) -> None:
        """Pack the layers again, in place."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_layers(self.model)
        if self.device.type == "cpu":
            pack_experts(self.model)

    def shutdown(self) -> None:
        """Leave the trainer's group."""
        if self.group is not None:
            self.group.close()
            self.group = None


def pack_tied_layers(model: Any) -> None:
    """Pack embeddings and output layers again.

    An output layer tied to the embedding gets no weights of its own in an update, so on a CPU vLLM 0.32 would continue
    to compute logits from the packed copy of the old ones.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def pack_experts(model: Any) -> None:
    """Pack the weights of experts again: on a CPU vLLM 0.32 packs them when it starts, but not in an update, and would
    compute with the new ones as if they were packed."""
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def flatten_heads(model: Any) -> None:
    """Give rotary embeddings their queries and keys as (tokens, heads * size).

    On a CPU vLLM 0.32 takes a query of shape (tokens, heads, size) for one of a single head, and turns most heads by
    wrong positions or not at all; its LFM2 has such queries. Other kinds of rotary embeddings, DeepSeek's among them,
    compute in plain torch there, and may need queries head by head.
    """
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module._forward_method = functools.partial(_turn_flat, module._forward_method)


def _turn_flat(turn: Any, positions: Any, query: torch.Tensor, key: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """Call `turn` with flat tensors, and return both in the shapes that they had."""
    turned, turned_key = turn(positions, query.flatten(1), None if key is None else key.flatten(1), **kwargs)
    return turned.view(query.shape), None if key is None else turned_key.view(key.shape)


class WorkerExtension:
    """Methods added to a worker. Naming this class makes vLLM import this module."""

    device: torch.device
    rank: int
    model_runner: Any
    weight_transfer_engine: Transfer

    def sharpen_prepare(self, has_experts: bool) -> str:
        """Mend what vLLM computes wrongly on a CPU, and let a mixture of experts return the experts of its tokens. To
        be called before the first request. Return why that failed; empty if it did not."""
        try:
            if self.device.type == "cpu":
                flatten_heads(self.model_runner.model)
            if has_experts:
                return_experts(self.model_runner)
        except Exception as error:  # no exception may reach vLLM: its core would stop working
            return reason(error)
        return ""

    def sharpen_try_to_read(self, packed: str) -> tuple[bool, str]:
        """See `engine.vllm.transfer.try_to_read`."""
        return try_to_read(packed, self.device)

    def sharpen_join(self, port: int, members: Sequence[int], limit_s: float) -> str:
        """Join the trainer's group if this worker is a member. Return why that failed; empty if it did not."""
        if self.rank not in members:
            return ""
        group = BroadcastGroup(self.device, rank=1 + members.index(self.rank), size=1 + len(members), port=port)
        try:
            in_thread(lambda: group.join(limit_s)).result(limit_s)
        except Exception as error:  # no exception may reach vLLM: its core would stop working
            group.close()
            return reason(error)
        self.weight_transfer_engine.group = group
        return ""


def _end_with(owner: int, parent: int, folder: str) -> None:
    """Wait until the owner process has ended, then kill vLLM's core process (this worker's parent, unless the worker
    runs in it) and this process, and remove their folder. vLLM itself would wait forever if its owner was killed."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        handle = None
    if handle is not None:
        select.select([handle], [], [])
    if os.getppid() == parent != owner:
        os.kill(parent, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
if OWNER_VARIABLE in os.environ:
    _WATCHED = (int(os.environ[OWNER_VARIABLE]), os.getppid(), os.environ[FOLDER_VARIABLE])
    threading.Thread(target=_end_with, args=_WATCHED, daemon=True).start()
