"""Loads the models that a trainer needs, and divides them among its ranks where there are several.

In: model directories, the trainer's settings, this rank's device. Out: policy, reference and teacher, ready to score.
A rank of several reads each model whole before it keeps its part: onto its GPU, or with `cpu_offload` into the CPU's
memory, so that no GPU ever holds more than a layer of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sharpen.config.trainer import TrainerConfig
from sharpen.trainer.lora import load_reference, load_trained
from sharpen.trainer.model import Scorer, TrainedModel, resolve_dtype
from sharpen.trainer.teacher import Teacher
from sharpen.trainer.team import Team


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that a setting means on this machine."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def load_roles(
    model_path: str | Path,
    config: TrainerConfig,
    device: torch.device,
    team: Team,
    *,
    needs_reference: bool,
    look: Callable[[TrainedModel], None] = lambda policy: None,
) -> tuple[TrainedModel, Scorer | None]:
    """The model that is trained, and the same before training if it is needed. `look` sees the first of them while it
    is whole. Raises `ModelError` for architectures not supported."""
    config, first = _loading(config, device)
    policy = load_trained(model_path, config, first)
    look(policy)
    team.divide(policy, cpu_offload=config.cpu_offload)
    if not needs_reference:
        return policy, None
    reference = load_reference(policy, model_path, config, first)
    if isinstance(reference, TrainedModel):
        team.divide(reference, cpu_offload=config.cpu_offload)
    return policy, reference


def load_teacher(source: str | Path, config: TrainerConfig, device: torch.device, team: Team) -> Teacher:
    """The frozen teacher. Raises `ModelError` as the policy does."""
    config, first = _loading(config, device)
    teacher = Teacher.load(source, dtype=config.dtype, device=first)
    team.divide(teacher.model, cpu_offload=config.cpu_offload, keep_head=True)  # the policy is compared with its head
    return teacher


def _loading(config: TrainerConfig, device: torch.device) -> tuple[TrainerConfig, torch.device]:
    """The settings with the compute type of the device, and where to read models to."""
    dtype = str(resolve_dtype(config.dtype, device)).removeprefix("torch.")
    return config.model_copy(update={"dtype": dtype}), torch.device("cpu") if config.cpu_offload else device
