"""Checkpoints hold the snapshots that answer policies (`policies.NAME.follow: trained`): a resumed run meets the same
opponent.

In: the serving side, the trainer, `policies`, a checkpoint. Out: a trainer whose checkpoints have a file for each
snapshot, and an engine that serves those of the checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sharpen.errors import CheckpointError
from sharpen.placement.policies import Policies, snapshots_of

if TYPE_CHECKING:
    import torch

    from sharpen.placement.place import Serving
    from sharpen.placement.trainers import AnyTrainer

_VERSION = "version"
"""The tensor of a snapshot's file that is its policy version."""


def keep_snapshots(serving: Serving, trainer: AnyTrainer, policies: Policies, checkpoint: Path | None) -> None:
    """Let the trainer's checkpoints hold the snapshots that the engine serves, and serve those of the `checkpoint` that
    the run continues from. Before the engine gets the trained weights. Raises `CheckpointError` without them."""
    if not (snapshots := snapshots_of(policies)):
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
