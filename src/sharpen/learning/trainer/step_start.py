"""Keeps a copy of the trained weights, their averages and optimizer moments from before a step, to go back to if it
fails.

In: the optimizers of the trained models. Out: their weights and moments of an earlier version, bit for bit. The copy is
in host memory, and is made only for steps of several updates: a single update is either made or not. A GPU copies while
it computes the first gradients of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sharpen.learning.trainer.optimizer import Optimizer
from sharpen.machine import available_bytes

SHARE = 0.5
"""Largest share of the free memory that the copy may take."""


class StepStart:
    """The weights and moments from before a step. Each rank keeps its own shards."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        averages: Mapping[str, torch.Tensor] | None = None,
        *,
        num_updates: int,
        num_ranks: int = 1,
    ) -> None:
        """`averages` are those of the weights, if they teach. `num_updates` is the largest number of updates of a step.
        All `num_ranks` are assumed to share the memory of this machine."""
        self._optimizers, self._averages = tuple(optimizers), averages or {}
        self._memory: dict[tuple[int, str], torch.Tensor] = {}
        self._kept: tuple[int, frozenset[tuple[int, str]], Any] | None = None
        self._changing = False
        self._copied: torch.cuda.Event | None = None
        self._device: torch.device | None = None
        self._enabled, self.line = num_updates > 1, ""
        if self._enabled:
            self._enabled, self.line = _check_memory(self._optimizers, self._averages, num_ranks)

    def begin(self, version: int, num_updates: int, extra: Any = None) -> None:
        """Begin a step of `num_updates` at `version`. `go_back` returns `extra`."""
        self._kept = None
        if self._enabled and num_updates > 1:
            live = self._live()
            self._copy_out(live)
            self._kept = version, frozenset(live), extra

    @contextmanager
    def update(self) -> Iterator[None]:
        """Enclose a change of weights and version. If an error leaves the block, they count as undefined."""
        if self._copied is not None:
            self._copied.wait(torch.cuda.current_stream(self._device))
        self._changing = True
        yield
        self._changing = False

    def is_whole(self) -> bool:
        """Whether every update has finished."""
        return not self._changing

    def go_back(self, version: int) -> tuple[bool, Any]:
        """Restore the state from before the step, if it was kept and is of `version`. Return whether it was, and the
        `extra` of `begin`."""
        if self._kept is None or self._kept[0] != version:
            return False, None
        _, names, extra = self._kept
        self._changing = True
        if self._copied is not None:
            self._copied.synchronize()
        for number, optimizer in enumerate(self._optimizers):
            optimizer.keep_state_of({name for owner, name in names if owner == number})
        for key, tensor in self._live().items():
            tensor.copy_(self._memory[key])
        self._changing = False
        return True, extra

    def _live(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return this rank's weights and moments of every optimizer, and the averages, not copied."""
        averages = {(len(self._optimizers), name): average for name, average in self._averages.items()}
        return averages | {
            (number, name): tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for number, optimizer in enumerate(self._optimizers)
            for name, tensor in optimizer.live_tensors().items()
        }

    @torch.no_grad()
    def _copy_out(self, live: dict[tuple[int, str], torch.Tensor]) -> None:
        for key, tensor in live.items():
            if key not in self._memory:
                self._memory[key] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        device = next(iter(live.values())).device
        if device.type != "cuda":
            for key, tensor in live.items():
                self._memory[key].copy_(tensor)
            return
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for key, tensor in live.items():
                self._memory[key].copy_(tensor, non_blocking=True)
        self._copied, self._device = stream.record_event(), device


def _check_memory(
    optimizers: Sequence[Optimizer], averages: Mapping[str, torch.Tensor], num_ranks: int
) -> tuple[bool, str]:
    """Return whether there is enough memory for the copy, and what to tell the user if not."""
    weights = [p.to_local() if isinstance(p, DTensor) else p for o in optimizers for p in o.parameters]
    needed = 3 * num_ranks * sum(map(_host_bytes, weights))  # the weights and two moments
    needed += num_ranks * sum(map(_host_bytes, averages.values()))
    reserved = num_ranks * sum(3 * weight.nbytes for weight in weights if not weight.is_cuda)  # moments, gradients
    free = max(0, available_bytes() - reserved)
    if needed <= SHARE * free:
        return True, ""
    return False, (
        f"no copy of the weights is kept before a step: it needs {needed / 2**30:.1f} GiB of memory, and only "
        f"{free / 2**30:.1f} GiB will be free. If a step fails after its first update, the last checkpoint stays as it "
        "is, and the run continues from there"
    )


def _host_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's copy; pinned memory, which a GPU copies into, is allocated in powers of two."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda else tensor.nbytes
