"""Further policies over the trained model, which answer the agents of their names (docs/use/policies.md).

In: `policies`, the embedded engine, the trainer. Out: an engine that serves their weights beside the trained ones, the
adapter of each policy for the gateway, and checkpoints that hold the snapshots, from which a run goes on exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sharpen.config.run import PolicyConfig
from sharpen.config.trainer import LoraConfig
from sharpen.contracts import ORIGINAL
from sharpen.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from sharpen.contracts import Engine
    from sharpen.placement.place import Serving
    from sharpen.placement.trainers import AnyTrainer

Policies = Mapping[str, PolicyConfig]
_VERSION = "version"
"""The tensor of a snapshot's file that is its policy version."""


def train_beside(engine: Engine, policies: Policies, lora: LoraConfig | None) -> None:
    """Let the engine keep the original weights and snapshots beside the trained ones, if there are policies
    (`run.decide`)."""
    if not policies:
        return
    from sharpen.engine.embedded.engine import EmbeddedEngine

    assert isinstance(engine, EmbeddedEngine)
    assert lora is not None
    engine.train_beside(lora, _snapshots(policies))


def adapters_of(policies: Policies) -> Mapping[str, str]:
    """Return the adapter that answers each policy's calls."""
    return {name: ORIGINAL if one.every is None else _snapshot(one.every) for name, one in policies.items()}


def keep_snapshots(serving: Serving, trainer: AnyTrainer, policies: Policies, checkpoint: Path | None) -> None:
    """Let the trainer's checkpoints hold the snapshots that the engine serves, and serve those of the `checkpoint` that
    the run continues from. Before the engine gets the trained weights. Raises `CheckpointError` without them."""
    if not (snapshots := _snapshots(policies)):
        return
    from sharpen.engine.embedded.engine import EmbeddedEngine
    from sharpen.learning.trainer import checkpoint as checkpoints
    from sharpen.learning.trainer.trainer import Trainer
    from sharpen.placement.local import LocalServing

    assert isinstance(serving, LocalServing)
    assert isinstance(trainer, Trainer)
    engine, kept = serving.engine, trainer
    assert isinstance(engine, EmbeddedEngine)
    saved = {} if checkpoint is None else checkpoints.load(checkpoint).further
    for name in snapshots if checkpoint is not None else ():
        if name not in saved:
            raise CheckpointError(f"{checkpoint} has no {name}.safetensors, the weights of a policy: start a new run")
        tensors = dict(saved[name])
        version = int(tensors.pop(_VERSION))
        serving.thread.call(engine.load_adapter(name, version, tensors))

    def served() -> dict[str, dict[str, torch.Tensor]]:
        return {name: _saved(*engine.adapter(name), every, kept.version) for name, every in snapshots.items()}

    trainer.beside = served


def _saved(version: int, tensors: dict[str, torch.Tensor], every: int, trained: int) -> dict[str, torch.Tensor]:
    """Return a snapshot as a file of the checkpoint of the `trained` version. Raises `CheckpointError` if it is not the
    snapshot of that version: a step failed after the engine had got its weights."""
    import torch

    if version != (wanted := max(0, trained - 1) // every * every):
        raise CheckpointError(
            f"the policy's snapshot of version {wanted}, which answered beside version {trained}, is no longer there: "
            f"it is of version {version}"
        )
    return {**tensors, _VERSION: torch.tensor(version)}


def _snapshots(policies: Policies) -> dict[str, int]:
    """Return after how many versions each snapshot is renewed, by its adapter's name; policies may share one."""
    return {_snapshot(one.every): one.every for one in policies.values() if one.every is not None}


def _snapshot(every: int) -> str:
    return f"snapshot_{every}"
