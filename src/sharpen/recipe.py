"""What a run is, decided once, before anything is loaded; nobody asks the configuration again.

In: a `RunConfig`. Out: a `Recipe` (an evaluation), a `RolloutRecipe` or a `RowRecipe`, which say the same on every
machine; with the user's functions and what this machine has, a `Job` (made by `sharpen.decide`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from sharpen.algorithm.presets import Algorithm
from sharpen.algorithm.resolve import algorithm_of
from sharpen.algorithm.supervised import SUPERVISED, SupervisedAlgorithm, learns_from_rows, resolve_supervised
from sharpen.config.problems import refuse
from sharpen.config.run import ExpertConfig, RunConfig, SupervisedConfig
from sharpen.config.trainer import CriticConfig
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
    """The recipe of a run that trains. Raises `ConfigError` for settings of which no recipe can be made."""
    if learns_from_rows(config):
        return RowRecipe(config=config, algorithm=resolve_supervised(config.algorithm.algorithm_type, config.loss))
    algorithm, schedule = algorithm_of(config), Schedule.of(config)
    replay = replay_settings(config, algorithm, ahead=schedule.max_staleness)
    return RolloutRecipe(config=config, algorithm=algorithm, schedule=schedule, replay=replay)


def check_settings(recipe: TrainingRecipe) -> None:
    """Raise `ConfigError` for settings by which nothing can be learnt, or that would have no effect: all of them at
    once. An evaluation may have them: a file that is explained, or planned with, need not be there to train."""
    refuse(_wrong_for_rollouts(recipe) if isinstance(recipe, RolloutRecipe) else _wrong_for_rows(recipe))


def _wrong_for_rows(recipe: RowRecipe) -> Iterator[str]:
    config, name = recipe.config, recipe.algorithm.name
    if config.mode != "both":
        yield f"mode is {config.mode!r}, which is of rollouts: {name!r} learns from rows, without explorer"
    if config.expert != ExpertConfig():
        yield f"the settings of expert have no effect: {name!r} learns from the rows of train_dataset alone"
    if config.sampling.order == "difficulty":
        yield f"sampling.order is 'difficulty', which goes by rewards: {name!r} has none"


def _wrong_for_rollouts(recipe: RolloutRecipe) -> Iterator[str]:
    config, algorithm = recipe.config, recipe.algorithm
    if config.supervised != SupervisedConfig() and config.expert.dataset is None:
        yield (
            f"the settings of supervised have no effect: {algorithm.name!r} learns from rollouts "
            f"({', '.join(SUPERVISED)} learn from rows)"
        )
    if config.critic != CriticConfig() and not algorithm.needs_critic:
        yield f"the settings of critic have no effect: {algorithm.name!r} has no critic (ppo has)"
    if recipe.overlaps:
        yield from _wrong_ahead(recipe)
    if config.model.top_p < 1.0:
        yield (
            f"model.top_p is {config.model.top_p:g}, but training needs tokens sampled from the model's whole "
            "distribution, which is the one that it changes: set top_p to 1"
        )
    if config.model.temperature == 0.0:
        yield "model.temperature is 0: greedy rollouts are all alike and nothing is learnt; set it to 1"


def _wrong_ahead(recipe: RolloutRecipe) -> Iterator[str]:
    """What is wrong where rollouts run ahead of the training."""
    config, algorithm = recipe.config, recipe.algorithm
    said = f"sync.style {config.sync.style!r}, interval {config.sync.interval}, offset {config.sync.offset}"
    if config.mode != "both":
        said = f"mode {config.mode!r}"
    if not (algorithm.off_policy or algorithm.needs_teacher):  # a teacher judges any state
        yield (
            f"with {said} tokens are of older policies, but {algorithm.policy_loss!r} of "
            f"{config.algorithm.algorithm_type!r} has no probability ratio to correct for them: leave sync out, or set "
            "loss.policy_loss to one that does (ppo, importance_sampling, topr, opmd)"
        )
    if config.deterministic and (config.sync.style != "fixed" or config.mode != "both"):
        yield (
            f"with {said} the clock decides which weights a rollout sees, so that no run repeats another bit by bit: "
            "set deterministic to false, or sync.style to fixed in one process (mode both)"
        )


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
    there, and on Ray, whose machines nobody has seen yet. `notices` say what this machine changes of the settings."""

    recipe: R
    workflow: Callable[..., Any] | None
    judge: Callable[..., Any] | None
    folder: Path
    teacher: Path | None = None
    engine: EngineChoice | None = None
    notices: tuple[str, ...] = ()

    @property
    def agent(self) -> Callable[..., Any]:
        """The workflow of a job that has one."""
        assert self.workflow is not None
        return self.workflow

    @property
    def config(self) -> RunConfig:
        """All settings."""
        return self.recipe.config


TrainingJob = Job[RolloutRecipe] | Job[RowRecipe]
