"""How weights travel: `load(version, tensors)` on every engine, into weights that the engine owns,
which may be the trainer's own memory (`execution.shared_weights`).

In: a policy version and its tensors (Hugging Face names). Out: engines that serve that version. *When* to publish is
the coordinator's decision: the synchronous loop publishes after every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class LoadsWeights(Protocol):
    """The side of an engine that this stage sees."""

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors in between two decode steps."""


async def publish(version: int, tensors: Mapping[str, torch.Tensor], engines: Sequence[LoadsWeights]) -> None:
    """Load one version into every engine; returns when all of them serve it."""
    await asyncio.gather(*(engine.load(version, tensors) for engine in engines))
