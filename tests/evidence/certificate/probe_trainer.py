"""A trainer as a run's settings make it, and what a gradient probe says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharpen.config.load import resolve
from sharpen.config.run import RunConfig
from sharpen.evidence.certificate.gradient_probe import WHOLE, GradientProbe, probe_gradients
from sharpen.evidence.certificate.plain.reread import others
from sharpen.learning.recipe import recipe_of
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer


def make_config(folder: Path, algorithm: str = "grpo", **settings: Any) -> RunConfig:
    """The settings of a run on the model in a folder."""
    given = {
        "model.model_path": str(folder),
        "model.max_model_len": 256,
        "train_dataset.path": "tasks.jsonl",
        "algorithm.algorithm_type": algorithm,
    }
    return resolve(None, {**given, **settings}, {}).config


def make_trainer(folder: Path, config: RunConfig) -> Trainer:
    return Trainer.load(
        TrainerPlan(
            model_path=folder,
            algorithm=recipe_of(config).algorithm,
            config=config.trainer,
            learning_rate=config.algorithm.learning_rate,
            planned_updates=1,
            critic=config.critic,
            teachers=config.distill.models,
            read_anew=frozenset(others(config, folder)),
        ),
        "cpu",
    )


def probed(
    folder: Path,
    algorithm: str = "grpo",
    fault: Callable[[Trainer], None] | None = None,
    whole: int = WHOLE,
    **settings: Any,
) -> GradientProbe:
    """Probe a trainer, after planting a fault in it; `whole`: see `probe_gradients`."""
    config = make_config(folder, algorithm, **settings)
    trainer = make_trainer(folder, config)
    if fault is not None:
        fault(trainer)
    return probe_gradients(config, folder, trainer, whole=whole)


def probed_twice(
    folder: Path, algorithm: str, fault: Callable[[Trainer], None], **settings: Any
) -> tuple[GradientProbe, GradientProbe]:
    """Probe a trainer, which that leaves as it was, and once more after planting a fault in it."""
    config = make_config(folder, algorithm, **settings)
    trainer = make_trainer(folder, config)
    right = probe_gradients(config, folder, trainer)
    fault(trainer)
    return right, probe_gradients(config, folder, trainer)


def write_model(folder: Path, model: Any) -> Path:
    """Write a model to a folder."""
    model.save_pretrained(folder)
    return folder
