"""The recipe of a run: its kind, algorithm and schedule, decided once, before anything is loaded.

In: a `RunConfig`. Out: a `Recipe` (an evaluation), a `RolloutRecipe` or a `RowRecipe`, which do not depend on the
machine. A `Job` adds the user's functions and what depends on the machine (made by `sharpen.run.decide`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from sharpen.config.problems import refuse
from sharpen.config.public import ENVIRONMENT, MIN_TEMPERATURE
from sharpen.config.run import ExpertConfig, RunConfig, SupervisedConfig
from sharpen.config.trainer import CriticConfig, LoraConfig
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.returns import OWN_REWARD
from sharpen.learning.algorithm.supervised import SUPERVISED, SupervisedAlgorithm, learns_from_rows, resolve_supervised
from sharpen.learning.experience.replay import ReplaySettings, replay_settings
from sharpen.learning.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The base of all recipes. By itself it is the recipe of an evaluation, which trains nothing."""

    config: RunConfig

    @property
    def overlaps(self) -> bool:
        """Whether rollouts ever run ahead of the trainer."""
        return False

    @property
    def needs_reward(self) -> bool:
        """Whether a rollout without a reward has failed."""
        return True

    @property
    def needs_metrics(self) -> tuple[str, ...]:
        """The metrics without which a scored rollout has failed."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecipe(Recipe):
    """A run that learns from rollouts: its algorithm, the schedule of weight updates, and the replay (None: no
    replay)."""

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

    @property
    def needs_metrics(self) -> tuple[str, ...]:
        """The metrics without which a scored rollout has failed."""
        told = self.config.distill.metrics_told
        return tuple(dict.fromkeys((*(one for one in self.algorithm.named_rewards if one != OWN_REWARD), *told)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecipe(Recipe):
    """A run that learns from rows, without rollouts."""

    algorithm: SupervisedAlgorithm


EngineType = str
"""`embedded`, `vllm`, or the name of somebody's own engine."""
TrainingRecipe = RolloutRecipe | RowRecipe
R = TypeVar("R", bound=Recipe, covariant=True)


def recipe_of(config: RunConfig) -> TrainingRecipe:
    """Return the recipe of a run that trains. Raises `ConfigError` for settings that give no valid recipe."""
    if learns_from_rows(config.algorithm):
        return RowRecipe(config=config, algorithm=resolve_supervised(config.algorithm.algorithm_type, config.loss))
    algorithm, updates = algorithm_of(config), config.trainer.updates
    schedule = Schedule.of(config.sync, mode=config.mode, updates=updates)
    replay = replay_settings(
        config.sampling, config.algorithm, algorithm, seed=config.seed, updates=updates, ahead=schedule.max_staleness
    )
    return RolloutRecipe(config=config, algorithm=algorithm, schedule=schedule, replay=replay)


def algorithm_of(config: RunConfig) -> Algorithm:
    """Return the algorithm of a run that learns from rollouts; see `resolve`."""
    return resolve(
        config.algorithm.algorithm_type,
        config.loss,
        config.algorithm.group_size,
        max_tokens=config.model.max_tokens,
        sampling=config.sampling,
        expert=config.expert,
        distill=config.distill,
    )


def check_settings(recipe: TrainingRecipe) -> None:
    """Raise `ConfigError`, with all problems at once, for settings that prevent learning or have no effect. Evaluating,
    explaining or planning accepts such settings, so this is not part of `recipe_of`."""
    refuse(_rollout_problems(recipe) if isinstance(recipe, RolloutRecipe) else _row_problems(recipe))


def _row_problems(recipe: RowRecipe) -> Iterator[str]:
    config, name = recipe.config, recipe.algorithm.name
    if config.mode != "both":
        yield f"mode is {config.mode!r}, which needs rollouts, but {name!r} learns from rows"
    if config.environment is not None and config.train_dataset.path == ENVIRONMENT:
        yield f"train_dataset.path is missing: {name!r} learns from rows, and on the environment it is only evaluated"
    if config.expert != ExpertConfig():
        yield f"the settings of expert have no effect: {name!r} learns from the rows of train_dataset alone"
    if config.sampling.order == "difficulty":
        yield f"sampling.order is 'difficulty', which needs rewards: {name!r} has none"


def _rollout_problems(recipe: RolloutRecipe) -> Iterator[str]:
    config, algorithm = recipe.config, recipe.algorithm
    if config.supervised != SupervisedConfig() and config.expert.dataset is None:
        yield (
            f"the settings of supervised have no effect: {algorithm.name!r} learns from rollouts "
            f"({', '.join(SUPERVISED)} learn from rows)"
        )
    if config.critic != CriticConfig() and not algorithm.needs_critic:
        yield f"the settings of critic have no effect: {algorithm.name!r} has no critic (ppo has)"
    if config.distill.own_weights == "current" and config.trainer.has_ranks:
        yield (
            f"distill.own_weights is 'current' with trainer.num_processes {config.trainer.num_processes}: the weights "
            "that train are shared out while they would teach; set own_weights to start, or num_processes to 1"
        )
    if config.distill.context is not None and config.loss.echo is not None:
        yield (
            f"loss.echo is {config.loss.echo:g} with distill.context: it learns from tokens of which a teacher that is "
            "told something else says nothing; leave out one of them"
        )
    if recipe.overlaps:
        yield from _sync_problems(recipe)
    yield from truncation_problems(recipe, config.engine.type)
    yield from _reward_problems(recipe)
    if config.journal.keep_steps is not None and algorithm.of_advantage.by_states:
        yield (
            f"journal.keep_steps is {config.journal.keep_steps}, but {algorithm.advantage!r} compares states, which "
            "messages show: without them its steps could not be certified. Leave it out"
        )
    if config.model.temperature == 0.0:
        yield "model.temperature is 0: all greedy rollouts of a task are the same, so nothing is learned; set it to 1"
    elif config.model.temperature < MIN_TEMPERATURE:
        yield (
            f"model.temperature is {config.model.temperature:g}: below {MIN_TEMPERATURE:g} rounding dominates the "
            f"logprobs, and almost every answer is the likeliest one; set it to 1, or to {MIN_TEMPERATURE:g} at least"
        )


def truncation_problems(recipe: RolloutRecipe, engine_type: str) -> Iterator[str]:
    """Yield the settings that cut the distribution, where the algorithm needs to know what was left of it, and an
    engine of this type does not say so."""
    model, algorithm = recipe.config.model, recipe.algorithm
    for name, value, whole in (("top_p", model.top_p, 1), ("top_k", model.top_k, 0), ("min_p", model.min_p, 0)):
        if value != whole and algorithm.needs_ratio and engine_type == "vllm":
            yield (
                f"model.{name} is {value:g}, but {algorithm.name!r} needs to know which tokens that leaves, which vLLM "
                f"does not say: set {name} to {whole}, engine.type to embedded, or train without a probability ratio "
                "(raft)"
            )


def _reward_problems(recipe: RolloutRecipe) -> Iterator[str]:
    """Yield the settings that change rewards which the advantage does not use."""
    config, algorithm = recipe.config, recipe.algorithm
    if recipe.needs_metrics and config.rollout.failure_reward is not None:
        yield (
            f"rollout.failure_reward is {config.rollout.failure_reward:g}, but a rollout that failed has none of "
            f"{', '.join(recipe.needs_metrics)} (loss.advantage_args.weights): leave it out"
        )
    for setting in ("overlong_cache", "length_penalty", "turns_penalty"):
        if getattr(config.sampling, setting) is None:
            continue
        if algorithm.named_rewards and OWN_REWARD not in algorithm.named_rewards:
            yield (
                f"sampling.{setting} has no effect: it changes a rollout's reward, and loss.advantage_args.weights has "
                f"only {', '.join(algorithm.named_rewards)}: add {OWN_REWARD}"
            )
        advantage = algorithm.of_advantage
        if setting != "overlong_cache" and (advantage.per_step or advantage.per_call):
            yield (
                f"sampling.{setting} changes the reward of a rollout, but {algorithm.advantage!r} uses those of "
                "steps or calls: leave it out"
            )


def _sync_problems(recipe: RolloutRecipe) -> Iterator[str]:
    """Yield the problems of settings with which rollouts run ahead of the trainer."""
    config, algorithm = recipe.config, recipe.algorithm
    style = f"sync.style {config.sync.style!r}, interval {config.sync.interval}, offset {config.sync.offset}"
    if config.mode != "both":
        style = f"mode {config.mode!r}"
    if not (algorithm.off_policy or algorithm.needs_teacher):  # a teacher scores tokens of any policy
        yield (
            f"with {style} tokens come from older policies, but {algorithm.policy_loss!r} of "
            f"{config.algorithm.algorithm_type!r} has no probability ratio to correct for them: leave sync out, or set "
            "loss.policy_loss to one that does (ppo, importance_sampling, topr, opmd)"
        )
    if config.deterministic and (config.sync.style != "fixed" or config.mode != "both"):
        yield (
            f"with {style} the weights of a rollout depend on timing, so runs are not reproducible: set deterministic "
            "to false, or sync.style to fixed in one process (mode both)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The type of the engine, and in a few words why it was chosen."""

    type: EngineType
    reason: str

    @property
    def line(self) -> str:
        """The line for the user."""
        return f"engine: {self.type} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[R]):
    """A recipe with the user's functions on this machine: the folders of the model and of the teachers by name, of
    which those in `read_anew` have other tokens than the model; and the engine. `workflow` is None if the run learns
    from rows and evaluates no agent. `engine` is None in that case and on Ray, where the machines are not known yet.
    `adapters` are those that the engine serves beside the model's own weights; None: it is given whole weights.
    `notices` are lines about settings that this machine overrides, and about such teachers."""

    recipe: R
    workflow: Callable[..., Any] | None
    judge: Callable[..., Any] | None
    folder: Path
    teachers: Mapping[str, Path] = field(default_factory=dict)
    read_anew: frozenset[str] = frozenset()
    engine: EngineChoice | None = None
    adapters: LoraConfig | None = None
    notices: tuple[str, ...] = ()

    def changed(self, config: RunConfig, adapters: LoraConfig | None) -> Self:
        """Return the job with other settings, which change where and how it computes, and nothing that it learns by;
        and with the adapters that the engine then serves."""
        return replace(self, recipe=replace(self.recipe, config=config), adapters=adapters)

    @property
    def agent(self) -> Callable[..., Any]:
        """The workflow; only for a job that has one."""
        assert self.workflow is not None
        return self.workflow

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return self.recipe.config


TrainingJob = Job[RolloutRecipe] | Job[RowRecipe]
