"""Loads the models that a trainer needs, and divides them among its ranks where there are several.

In: a `TrainerPlan`, this rank's device. Out: policy, reference, critic and teacher, ready to score. A rank of several
reads each model whole before it keeps its part: onto its GPU, or with `cpu_offload` into the CPU's memory, so that no
GPU ever holds more than a layer of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sharpen.algorithm.presets import Algorithm
from sharpen.algorithm.supervised import SupervisedAlgorithm
from sharpen.config.trainer import CriticConfig, TrainerConfig
from sharpen.trainer.critic import Critic
from sharpen.trainer.lora import load_reference, load_trained
from sharpen.trainer.model import DType, Scorer, TrainedModel, resolve_dtype
from sharpen.trainer.rounding import Rounding, measure
from sharpen.trainer.teacher import Teacher
from sharpen.trainer.team import Team
from sharpen.types import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """What a trainer trains; it pickles.

    The model directory is the policy, and again the frozen reference if the algorithm needs one (with adapters, the
    policy without them is the reference), and the critic's start. The model in `teacher_path` is the teacher, if the
    algorithm has one; its vocabulary must be the policy's. `planned_updates` is what the learning-rate schedule spans.
    `probe` is what an engine with the same weights, which computes in `engine_dtype`, continued some prompts by: by it
    rounding is measured, where there is any.
    """

    model_path: str | Path
    algorithm: Algorithm | SupervisedAlgorithm
    config: TrainerConfig
    learning_rate: float
    planned_updates: int
    seed: int = 0
    teacher_path: str | Path | None = None
    critic: CriticConfig = field(default_factory=CriticConfig)
    probe: Sequence[Experience] = ()
    engine_dtype: DType = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The models of a trainer, this rank's part of each; None where the algorithm needs none."""

    policy: TrainedModel
    reference: Scorer | None
    critic: Critic | None
    teacher: Teacher | None
    rounding: Rounding | None


def load_roles(plan: TrainerPlan, device: str | torch.device, team: Team) -> Roles:
    """The models of a plan; torch's generator starts from its seed. Raises `ModelError` for architectures not
    supported, `ParityError` if the engine that gave the probe serves another model."""
    torch.manual_seed(plan.seed)
    place, algorithm = _resolve_device(device), plan.algorithm
    dtype = str(resolve_dtype(plan.config.dtype, place)).removeprefix("torch.")
    config = plan.config.model_copy(update={"dtype": dtype})
    offload, first = config.cpu_offload, torch.device("cpu") if config.cpu_offload else place
    policy = load_trained(plan.model_path, config, first)
    engine_dtype, most = resolve_dtype(plan.engine_dtype, place), config.max_tokens_per_micro_batch
    rounding = measure(policy, plan.probe, engine_dtype=engine_dtype, max_tokens=most, team=team)
    team.divide(policy, cpu_offload=offload)
    reference = critic = teacher = None
    if algorithm.needs_reference:
        reference = load_reference(policy, plan.model_path, config, first)
        if isinstance(reference, TrainedModel):
            team.divide(reference, cpu_offload=offload)
    if isinstance(algorithm, Algorithm) and algorithm.needs_critic:
        critic = Critic.load(
            plan.model_path,
            config=plan.critic,
            trainer_config=config,
            planned_updates=plan.planned_updates,
            device=first,
            team=team,
        )
    if isinstance(algorithm, Algorithm) and algorithm.needs_teacher:
        assert plan.teacher_path is not None, f"{algorithm.name} needs a teacher"
        teacher = Teacher.load(plan.teacher_path, dtype=config.dtype, device=first)
        team.divide(teacher.model, cpu_offload=offload, keep_head=True)  # the policy is compared with its head
    return Roles(policy=policy, reference=reference, critic=critic, teacher=teacher, rounding=rounding)


def _resolve_device(device: str | torch.device) -> torch.device:
    """The device that a setting means on this machine."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
