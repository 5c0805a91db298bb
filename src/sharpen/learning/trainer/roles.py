"""Loads the models that a trainer needs, and shards them if there are several ranks.

In: a `TrainerPlan`, this rank's device. Out: policy, reference, critic and teachers, ready to score. Each rank loads
each model whole before it is sharded: onto its GPU, or with `cpu_offload` into CPU memory, so that no GPU ever holds
more than one layer of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sharpen.config.trainer import CriticConfig, TrainerConfig
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.supervised import SupervisedAlgorithm
from sharpen.learning.trainer.critic import Critic
from sharpen.learning.trainer.lora import load_trained
from sharpen.learning.trainer.model import DType, TrainedModel, resolve_dtype
from sharpen.learning.trainer.reference import Reference, load_reference
from sharpen.learning.trainer.rounding import Rounding, measure
from sharpen.learning.trainer.teacher import OwnTeacher, RecordedTeacher, Teacher, Teachers
from sharpen.learning.trainer.team import Team
from sharpen.models.frozen import Served
from sharpen.types import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """The description of a trainer; picklable.

    `model_path` is the policy, the initial critic and, if the algorithm needs one, the frozen reference (with adapters,
    the reference is the policy without them). `teachers` are those of an algorithm with teachers, by name (`Teachers`);
    they must have the policy's vocabulary, but for those in `read_anew` (`Teacher.reads_anew`). The learning-rate
    schedule spans `planned_updates`. `probe` holds continuations of some prompts by an engine with the same weights,
    which computes in `engine_dtype`; they serve to measure rounding.
    """

    model_path: str | Path
    algorithm: Algorithm | SupervisedAlgorithm
    config: TrainerConfig
    learning_rate: float
    planned_updates: int
    seed: int = 0
    teachers: Mapping[str, str | Path] = field(default_factory=dict)
    read_anew: frozenset[str] = frozenset()
    critic: CriticConfig = field(default_factory=CriticConfig)
    probe: Sequence[Experience] = ()
    engine_dtype: DType = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The models of a trainer, this rank's shard of each; None if the algorithm does not need one."""

    policy: TrainedModel
    reference: Reference | None
    critic: Critic | None
    teachers: Teachers | None
    rounding: Rounding | None


def load_roles(plan: TrainerPlan, device: str | torch.device, team: Team, served: Served | None = None) -> Roles:
    """Load the models of a plan, after seeding torch's generator. `served` as in `lora.load_trained`. Raises
    `ModelError` for unsupported architectures, `ParityError` if the engine that made the probe serves another model."""
    torch.manual_seed(plan.seed)
    device, algorithm = _resolve_device(device), plan.algorithm
    dtype = str(resolve_dtype(plan.config.dtype, device)).removeprefix("torch.")
    config = plan.config.model_copy(update={"dtype": dtype})
    offload, load_device = config.cpu_offload, torch.device("cpu") if config.cpu_offload else device
    policy = load_trained(plan.model_path, config, load_device, served)
    engine_dtype, max_tokens = resolve_dtype(plan.engine_dtype, device), config.max_tokens_per_micro_batch
    rounding = measure(policy, plan.probe, engine_dtype=engine_dtype, max_tokens=max_tokens, team=team)
    team.divide(policy, cpu_offload=offload)
    reference = critic = teachers = None
    if algorithm.needs_reference:
        reference = load_reference(policy, plan.model_path, config, load_device, team)
    if isinstance(algorithm, Algorithm) and algorithm.needs_critic:
        critic = Critic.load(
            plan.model_path,
            config=plan.critic,
            trainer_config=config,
            planned_updates=plan.planned_updates,
            device=load_device,
            team=team,
        )
    if isinstance(algorithm, Algorithm) and algorithm.distill is not None:
        distill = algorithm.distill
        assert bool(plan.teachers) + distill.own + (distill.endpoint is not None) == 1, f"{algorithm.name}: one teacher"
        loaded: dict[str, Teacher] = {"": OwnTeacher(policy, distill.own_decay)} if distill.own else {}
        if distill.endpoint is not None:
            loaded[""] = RecordedTeacher(distill.endpoint)
        for name, path in plan.teachers.items():
            anew = name in plan.read_anew
            loaded[name] = Teacher.load(path, dtype=config.dtype, device=load_device, reads_anew=anew)
            team.divide(loaded[name].model, cpu_offload=offload, keep_head=True)  # the policy is compared with its head
        teachers = Teachers(loaded, num_ranks=team.size)
    return Roles(policy=policy, reference=reference, critic=critic, teachers=teachers, rounding=rounding)


def _resolve_device(device: str | torch.device) -> torch.device:
    """Return the device for a setting on this machine."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
