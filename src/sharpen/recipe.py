"""What a run is, decided once, before anything is loaded; nobody asks the configuration again.

In: a `RunConfig`. Out: a `Recipe` (an evaluation), a `RolloutRecipe` or a `RowRecipe`, which say the same on every
machine; with the user's functions and what this machine has, a `Job` (made by `sharpen.decide`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from sharpen.algorithm.presets import Algorithm
from sharpen.algorithm.resolve import algorithm_of
from sharpen.algorithm.supervised import SupervisedAlgorithm, learns_from_rows, resolve_supervised
from sharpen.config.run import RunConfig
from sharpen.experience.replay import ReplaySettings, replay_settings
from sharpen.sync.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What every run is made by; alone it is an evaluation: nothing is trained."""

    config: RunConfig

    @property
    def overlaps(self) -> bool:
        """Whether rollouts ever run ahead of the trainer."""
        return False

    @property
    def needs_reward(self) -> bool:
        """Whether a rollout without a reward has failed."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecipe(Recipe):
    """A run that learns from rollouts: by which algorithm, when weights move, and what trains again (None: nothing)."""

    algorithm: Algorithm
    schedule: Schedule
    replay: ReplaySettings | None

    @property
    def overlaps(self) -> bool:
        """Whether rollouts ever run ahead of the trainer."""
        return self.schedule.overlaps

    @property
    def needs_reward(self) -> bool:
        """Whether a rollout without a reward has failed."""
        return self.algorithm.needs_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecipe(Recipe):
    """A run that learns from rows, and from rollouts nothing."""

    algorithm: SupervisedAlgorithm


EngineType = Literal["embedded", "vllm"]
TrainingRecipe = RolloutRecipe | RowRecipe
R = TypeVar("R", bound=Recipe, covariant=True)


def recipe_of(config: RunConfig) -> TrainingRecipe:
    """The recipe of a run that trains. Raises `ConfigError` for settings that cannot hold, or would have no effect."""
    if learns_from_rows(config):
        return RowRecipe(config=config, algorithm=resolve_supervised(config.algorithm.algorithm_type, config.loss))
    algorithm, schedule = algorithm_of(config), Schedule.of(config)
    replay = replay_settings(config, algorithm, ahead=schedule.max_staleness)
    return RolloutRecipe(config=config, algorithm=algorithm, schedule=schedule, replay=replay)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine, and why it was taken, in a few words."""

    type: EngineType
    reason: str

    @property
    def line(self) -> str:
        """What to tell the user."""
        return f"engine: {self.type} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[R]):
    """A recipe with the user's functions, on this machine: the folder of the model, that of the teacher if there is
    one, and which engine serves. `workflow` is None where rows are learnt and no agent is evaluated; `engine` is None
    there, and on Ray, whose machines nobody has seen yet."""

    recipe: R
    workflow: Callable[..., Any] | None
    judge: Callable[..., Any] | None
    folder: Path
    teacher: Path | None = None
    engine: EngineChoice | None = None

    @property
    def agent(self) -> Callable[..., Any]:
        """The workflow of a job that has one."""
        assert self.workflow is not None
        return self.workflow

    @property
    def config(self) -> RunConfig:
        """All settings."""
        return self.recipe.config
