"""Weights that engine and trainer have in common: those that are shared, so that `load` copies nothing, and the frozen
ones beneath adapters, so that it takes the adapters alone.

In: a run's engine and its trainer. Out: what the trainer gives to `load` from now on. Memory is shared in runs in which
the engine has no call while the trainer computes: an update changes what is served before `load` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharpen.execution.trainers import AnyTrainer
    from sharpen.inference.engine import Engine


def share_weights(engine: Engine, trainer: AnyTrainer) -> bool:
    """Let the policy live in the memory of an embedded engine, if both are in this process, of one type and on one
    device, and the policy has no adapters; else leave both as they are."""
    from sharpen.inference.embedded.engine import EmbeddedEngine
    from sharpen.trainer.trainer import Trainer

    if not isinstance(engine, EmbeddedEngine) or not isinstance(trainer, Trainer):
        return False
    return trainer.policy.move_weights_into(engine.weights())


def publish_adapters_alone(engine: Engine, trainer: AnyTrainer) -> bool:
    """Let the trainer give its adapters without merging them, if the engine was started to take them so."""
    from sharpen.execution.ranks.group import TrainerGroup
    from sharpen.trainer.lora import AdaptedModel

    if not getattr(engine, "takes_adapters", False):
        return False
    assert not isinstance(trainer, TrainerGroup), "ranks give merged weights"
    assert isinstance(trainer.policy, AdaptedModel)
    trainer.policy.alone = True
    return True
