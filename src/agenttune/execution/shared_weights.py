"""Weights that engine and trainer have in common: one transport of `load`, which then copies nothing.

In: a run's engine and its trainer. Out: whether the trained model keeps its weights in the engine's memory now. For
runs in which the engine has no call while the trainer computes: an update changes what is served before `load` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agenttune.execution.trainers import AnyTrainer
    from agenttune.inference.engine import Engine


def share_weights(engine: Engine, trainer: AnyTrainer) -> bool:
    """Let the policy live in the memory of an embedded engine, if both are in this process, of one type and on one
    device, and the policy has no adapters; else leave both as they are."""
    from agenttune.inference.embedded import EmbeddedEngine
    from agenttune.trainer.trainer import Trainer

    if not isinstance(engine, EmbeddedEngine) or not isinstance(trainer, Trainer):
        return False
    return trainer.policy.keep_in(engine.weights())
