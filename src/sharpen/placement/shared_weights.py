"""Cheaper weight updates: engine and trainer share memory, so that `load` copies nothing, or `load` takes only
adapters.

In: a run's engine and its trainer. Out: whether it applies; the trainer then gives other tensors to `load`. Memory is
shared only if the engine has no call while the trainer computes, since an update changes the served weights before
`load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharpen.contracts import Engine
    from sharpen.placement.trainers import AnyTrainer


def share_weights(engine: Engine, trainer: AnyTrainer) -> bool:
    """Move the policy's weights into the memory of the embedded engine. Return False, with no change, unless both are
    in this process with equal dtype and device, and the policy has no adapters."""
    from sharpen.engine.embedded.engine import EmbeddedEngine
    from sharpen.learning.trainer.trainer import Trainer

    if not isinstance(engine, EmbeddedEngine) or not isinstance(trainer, Trainer):
        return False
    return trainer.policy.move_weights_into(engine.weights())


def publish_unmerged_adapters(engine: Engine, trainer: AnyTrainer) -> bool:
    """Let the trainer publish its adapters unmerged, if the engine was started to load such adapters. With the embedded
    engine it also uses the engine's frozen layers and experts from now on."""
    from sharpen.engine.embedded.engine import EmbeddedEngine
    from sharpen.learning.trainer.lora import AdaptedModel
    from sharpen.placement.ranks.group import TrainerGroup

    if not getattr(engine, "takes_adapters", False):
        return False
    assert not isinstance(trainer, TrainerGroup), "ranks give merged weights"
    assert isinstance(trainer.policy, AdaptedModel)
    trainer.policy.alone = True
    if isinstance(engine, EmbeddedEngine):
        trainer.policy.share_base(engine.adapted_layers(), engine.experts())
    return True
