"""Makes the trainer of a run, in the coordinator's process or in several processes that train together.

In: a run's `Job`. Out: a trainer; or `ConfigError` before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ConfigError
from sharpen.learning.recipe import TrainingJob
from sharpen.placement.engine_choice import check_gpu
from sharpen.types import Experience

if TYPE_CHECKING:
    from sharpen.contracts import Engine
    from sharpen.learning.trainer.trainer import Trainer
    from sharpen.models.frozen import Served
    from sharpen.placement.ranks.group import StartRanks, TrainerGroup


AnyTrainer: TypeAlias = "Trainer | TrainerGroup"


def check_trainer(config: TrainerConfig, device: str) -> None:
    """Raise `ConfigError` for devices and processes that this machine cannot provide, and for settings without effect.
    `device` is that of the engine, which is the trainer's too. Not for Ray: there the cluster's GPUs count."""
    check_gpu(device)
    if config.has_ranks:
        check_processes(config, device, num_gpus=_num_gpus())
    elif config.offload_activations:
        check_offload(config, device, num_gpus=_num_gpus(), where="here")


def check_processes(config: TrainerConfig, device: str, *, num_gpus: int) -> None:
    """Raise `ConfigError` if a machine with `num_gpus` GPUs cannot run the trainer's processes."""
    check_offload(config, device, num_gpus=num_gpus, where="here")
    if trains_on_gpus(device, num_gpus) and config.num_processes > num_gpus:
        raise ConfigError(
            f"trainer.num_processes is {config.num_processes}, but this machine has {num_gpus} GPU(s) and each "
            "process needs one: set it lower, or engine.device to cpu"
        )


def check_offload(config: TrainerConfig, device: str, *, num_gpus: int, where: str) -> None:
    """Raise `ConfigError` for `trainer.cpu_offload` and `offload_activations` if the trainer computes on the CPU, or if
    nothing is recomputed, so that all activations would move."""
    asked = [name for name in ("cpu_offload", "offload_activations") if getattr(config, name)]
    if asked and not trains_on_gpus(device, num_gpus):
        raise ConfigError(
            f"trainer.{asked[0]} is true, but the trainer computes on the CPU (engine.device "
            f"{device!r}, {num_gpus} GPUs {where}): it has no effect, leave it out"
        )
    if config.offload_activations and not config.gradient_checkpointing:
        raise ConfigError(
            "trainer.offload_activations is true without trainer.gradient_checkpointing: all that every layer keeps "
            "would travel to the CPU and back, copies of weights too; set trainer.gradient_checkpointing to true too"
        )


def make_trainer(
    job: TrainingJob,
    *,
    total_steps: int,
    ranks: StartRanks | None = None,
    probe: Sequence[Experience] = (),
    engine: Engine | None = None,
) -> AnyTrainer:
    """Load the trainer of a job. `ranks` starts its ranks elsewhere (None: on this machine); `probe` comes from
    `placement.probe.probe_at_start`. What an `engine` in this process has of the weights is not read again where they
    are shared (`trainer.lora.base`). Raises `ParityError` if the engine of the probe serves another model, `ModelError`
    for an architecture that is not supported, `RankError` if a process does not start."""
    from sharpen.learning.trainer.roles import TrainerPlan

    config, algorithm = job.config, job.recipe.algorithm
    plan = TrainerPlan(
        model_path=job.folder,
        algorithm=algorithm,
        config=config.trainer,
        learning_rate=config.algorithm.learning_rate,
        planned_updates=total_steps * config.trainer.updates,
        seed=config.seed,
        teachers=job.teachers,
        read_anew=job.read_anew,
        critic=config.critic,
        probe=tuple(probe),
        engine_dtype=config.engine.dtype,
    )
    if ranks is None and not config.trainer.has_ranks:
        from sharpen.learning.trainer.trainer import Trainer

        return Trainer.load(plan, config.engine.device, served=served_parts(engine))
    from sharpen.placement.ranks.group import TrainerGroup

    if ranks is not None:
        return TrainerGroup(ranks(plan))
    from sharpen.placement.ranks.processes import RankProcesses

    on_gpus = trains_on_gpus(config.engine.device, _num_gpus())
    return TrainerGroup(RankProcesses(plan, config.trainer.num_processes, on_gpus=on_gpus))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def trains_on_gpus(device: str, num_gpus: int) -> bool:
    """Whether the trainer computes on GPUs, if there are `num_gpus`."""
    return device.startswith("cuda") or (device == "auto" and num_gpus > 0)


# Cheaper weight updates: engine and trainer share memory, so that `load` copies nothing, or `load` takes only adapters.
#
# In: a run's engine and its trainer. Out: whether it applies; the trainer then gives other tensors to `load`. Memory is
# shared only if the engine has no call while the trainer computes, since an update changes the served weights before
# `load`.


def share_weights(engine: Engine, trainer: AnyTrainer) -> bool:
    """Move the policy's weights into the memory of the embedded engine. Return False, with no change, unless both are
    in this process with equal dtype and device, and the policy has no adapters."""
    from sharpen.engine.embedded.engine import EmbeddedEngine
    from sharpen.learning.trainer.trainer import Trainer

    if not isinstance(engine, EmbeddedEngine) or not isinstance(trainer, Trainer):
        return False
    return trainer.policy.move_weights_into(engine.weights())


def served_parts(engine: Engine | None) -> Served | None:
    """Return the frozen weights and layers of an embedded engine that takes adapters; None of any other."""
    if engine is None or not getattr(engine, "shares_base", False):
        return None
    from sharpen.engine.embedded.engine import EmbeddedEngine
    from sharpen.models.frozen import Served
    from sharpen.models.nf4 import NF4Linear

    if not isinstance(engine, EmbeddedEngine):
        return None
    own = {name.replace(".base_layer.", "."): tensor for name, tensor in engine.weights().items()}
    bases = {name: getattr(layer, "base_layer", None) for name, layer in engine.adapted_layers().items()}
    in_4_bits = {name: base for name, base in bases.items() if isinstance(base, NF4Linear)}
    apart = {f"{name}.weight" for name in in_4_bits}
    weights = {name: tensor for name, tensor in own.items() if ".lora_" not in name and name not in apart}
    return Served(weights=weights, in_4_bits=in_4_bits)


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
    if isinstance(engine, EmbeddedEngine) and engine.shares_base:
        trainer.policy.share_base(engine.adapted_layers(), engine.experts(), engine.weights())
    return True
