"""The start of a step: what is trained as it was before the step's first update, to go back to when the step does not
come to its end.

In: the optimizers of what is trained. Out: their weights and moments of an earlier version, to the last bit. They are
kept in the host's memory, and only in steps of several updates: a single one is made or not made. A GPU copies them out
while it computes the step's first gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sharpen.trainer.host_memory import available_bytes
from sharpen.trainer.optimizer import Optimizer

SHARE = 0.5
"""Of the memory that is free, the share that a start may take."""


class StepStart:
    """Knows which version the weights are of, and has the one before the step. Each rank keeps its own parts."""

    def __init__(self, optimizers: Sequence[Optimizer], *, num_updates: int, num_ranks: int = 1) -> None:
        """`num_updates` is how many a step makes at most; so many ranks are taken to share this machine's memory."""
        self._optimizers = tuple(optimizers)
        self._memory: dict[tuple[int, str], torch.Tensor] = {}
        self._kept: tuple[int, frozenset[tuple[int, str]], Any] | None = None
        self._changing = False
        self._copied: torch.cuda.Event | None = None
        self._device: torch.device | None = None
        self._keeps, self.line = num_updates > 1, ""
        if self._keeps:
            self._keeps, self.line = _room(self._optimizers, num_ranks)

    def begin(self, version: int, num_updates: int, further: Any = None) -> None:
        """A step begins at this version. `further` is handed back by `go_back`."""
        self._kept = None
        if self._keeps and num_updates > 1:
            live = self._live()
            self._copy_out(live)
            self._kept = version, frozenset(live), further

    @contextmanager
    def update(self) -> Iterator[None]:
        """In this block weights and version change. Where it is left by an error, nobody knows what they are."""
        if self._copied is not None:
            self._copied.wait(torch.cuda.current_stream(self._device))
        self._changing = True
        yield
        self._changing = False

    def is_whole(self) -> bool:
        """Whether no update was left in the midst."""
        return not self._changing

    def go_back(self, version: int) -> tuple[bool, Any]:
        """Put back what the step began with, if that was kept and is of this version: whether it was, and what `begin`
        was given."""
        if self._kept is None or self._kept[0] != version:
            return False, None
        _, names, further = self._kept
        self._changing = True
        if self._copied is not None:
            self._copied.synchronize()
        for number, optimizer in enumerate(self._optimizers):
            optimizer.keep_state_of({name for of, name in names if of == number})
        for key, tensor in self._live().items():
            tensor.copy_(self._memory[key])
        self._changing = False
        return True, further

    def _live(self) -> dict[tuple[int, str], torch.Tensor]:
        """The memory itself: weights and moments of every optimizer, this rank's part."""
        return {
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


def _room(optimizers: Sequence[Optimizer], num_ranks: int) -> tuple[bool, str]:
    """Whether there is memory for a start, and what to tell the user if not."""
    weights = [p.to_local() if isinstance(p, DTensor) else p for o in optimizers for p in o.parameters]
    start = 3 * num_ranks * sum(map(_host_bytes, weights))  # the weights and two moments
    to_come = num_ranks * sum(3 * weight.nbytes for weight in weights if not weight.is_cuda)  # moments, gradients
    free = max(0, available_bytes() - to_come)
    if start <= SHARE * free:
        return True, ""
    return False, (
        f"the start of a step is not kept: it takes {start / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB will "
        "be free. A step that fails behind its first update leaves the last checkpoint as it is"
    )


def _host_bytes(tensor: torch.Tensor) -> int:
    """What a copy takes: memory that a GPU copies into is handed out in powers of two."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda else tensor.nbytes
