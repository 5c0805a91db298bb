"""The effective values of settings that are not given: from the algorithm's preset, from other settings, or from the
run when it starts.

In: a run's configuration. Out: for settings that are null (and parameters of the algorithm without a setting of their
own) the effective value and its origin. Any other null means what the documentation of the setting says: no limit, or
not present.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sharpen.config.distill import DistillConfig
from sharpen.config.run import ExpertConfig, LossConfig, RunConfig
from sharpen.learning.algorithm.distill import Distill
from sharpen.learning.algorithm.presets import Algorithm, algorithm_named
from sharpen.learning.algorithm.resolve import TIGHT_CLIP
from sharpen.learning.algorithm.supervised import SupervisedAlgorithm
from sharpen.learning.recipe import RolloutRecipe, RowRecipe, TrainingRecipe, recipe_of

Effective = tuple[Any, str]
"""The effective value, and its origin."""
_LOSS = ("clip_low", "clip_high", "dual_clip")
_ADVANTAGE = ("std_normalize", "step_norm")


def effective(config: RunConfig) -> dict[str, Effective]:
    """Return the effective values by dotted name. Raises `ConfigError` for settings that the algorithm refuses."""
    recipe = recipe_of(config)
    if isinstance(recipe, RowRecipe):
        values = dict(_of_supervised(recipe.algorithm))
    else:
        values = {**dict(_of_algorithm(recipe.algorithm, config)), **dict(_of_rollouts(recipe))}
    return {**values, **dict(_of_run(recipe))}


def _of_algorithm(algorithm: Algorithm, config: RunConfig) -> Iterator[tuple[str, Effective]]:
    """Yield the values of section `loss`, and the other values that a preset sets."""
    preset, given_loss = f"preset {algorithm.name}", config.loss
    for part in ("advantage", "policy_loss", "kl", "entropy_coef", "aggregation"):
        yield f"loss.{part}", (getattr(algorithm, part), preset)
    own_behaviour = algorithm_named(algorithm.name).behaviour == algorithm.behaviour
    yield "loss.behaviour", (algorithm.behaviour, preset if own_behaviour else f"a clip below {TIGHT_CLIP:g}")
    yield "loss.kl_coef", (algorithm.kl_coef, "loss.kl none" if given_loss.kl == "none" else preset)
    advantage, loss = algorithm.of_advantage.configured, algorithm.of_policy_loss.configured
    for part, own, function, configured in (
        ("advantage", _ADVANTAGE, advantage, algorithm.advantage_args),
        ("policy_loss", _LOSS, loss, algorithm.policy_loss_args),
    ):
        name, parameters = getattr(algorithm, part), _parameters(function, configured)
        origin = preset if getattr(given_loss, part) is None else f"loss.{part} {name}"
        for setting in own:
            absent = (None, f"no parameter of loss.{part} {name}")
            yield f"loss.{setting}", (parameters.pop(setting), origin) if setting in parameters else absent
        for parameter, value in parameters.items():
            yield f"loss.{part}_args.{parameter}", (value, origin)
    no_kl = "no KL term"
    adapts = "kl_coef is constant" if algorithm.needs_reference else no_kl
    yield "loss.kl_in", (algorithm.kl_in, preset) if algorithm.needs_reference else (None, no_kl)
    yield "loss.kl_target", (algorithm.kl_target, preset if algorithm.kl_target is not None else adapts)
    yield "loss.kl_horizon", (algorithm.kl_horizon, preset) if algorithm.kl_target is not None else (None, adapts)
    for side in ("behaviour_low", "behaviour_high"):
        bound, correction = getattr(algorithm, side), f"loss.behaviour {algorithm.behaviour}"
        yield f"loss.{side}", (bound, correction if bound is not None else f"no parameter of {correction}")
    masks = algorithm.sequence_mask
    yield "loss.sequence_mask", (masks, preset if masks is not None else f"{preset}: no sequence is left out")
    yield "loss.echo", (algorithm.echo, preset if algorithm.echo is not None else f"{preset}: not trained")
    constant = algorithm.aggregation == "constant-length"
    origin = "model.max_tokens" if constant else f"no parameter of loss.aggregation {algorithm.aggregation}"
    yield "loss.constant_length", (algorithm.constant_length, origin)
    dropped = preset if algorithm.std_threshold is not None else f"{preset}: no group is dropped"
    yield "loss.std_threshold", (algorithm.std_threshold, dropped)
    yield "sampling.max_refill", (algorithm.max_refill, preset)
    expert, distill = algorithm.expert, algorithm.distill
    if expert is not None:
        for setting in ("mu", "phi"):
            yield f"expert.{setting}", (getattr(expert, setting), preset)
        yield "expert.mu_warmup_steps", (expert.mu_warmup_steps, preset)
        for setting in ("mu_decay_steps", "mu_valley"):
            yield f"expert.{setting}", (None, f"{preset}: mu is constant")
    if distill is not None:
        yield from _of_distill(distill, preset)
    for section, missing, settings in (
        ("expert", expert is None, ExpertConfig),
        ("distill", distill is None, DistillConfig),
    ):
        if missing:
            absent = (None, f"no part of {algorithm.name}")
            nothing = (name for name, field in settings.model_fields.items() if field.default is None)
            yield from ((f"{section}.{name}", absent) for name in nothing)


def _of_distill(distill: Distill, preset: str) -> Iterator[tuple[str, Effective]]:
    """Yield those of an algorithm with a teacher."""
    for setting in ("divergence", "coef"):
        yield f"distill.{setting}", (getattr(distill, setting), preset)
    if distill.teachers:
        yield "distill.teacher_path", (None, "each task has its own of distill.teachers")
    else:
        yield "distill.teacher_path", (None, "distill.own_weights: the model teaches itself")
        yield "distill.teacher_key", (None, "all tasks have the same teacher")
    yield "distill.own_weights", (None, "another model teaches")
    yield "distill.context", (None, "the teacher reads what the model read")
    mixes = distill.divergence == "js"
    absent = (None, f"no parameter of distill.divergence {distill.divergence}")
    yield "distill.beta", (distill.beta, preset) if mixes else absent


def _of_rollouts(recipe: RolloutRecipe) -> Iterator[tuple[str, Effective]]:
    """Yield the values that other settings determine in a run with rollouts."""
    config, algorithm, replay = recipe.config, recipe.algorithm, recipe.replay
    shapes = config.sampling.overlong_cache is not None
    length = (algorithm.shaping.max_length, "model.max_tokens") if shapes else (None, "no overlong_cache")
    yield "sampling.overlong_length", length
    yield "sync.max_staleness", (recipe.schedule.max_staleness, "sync.style, interval and offset, in updates")
    replayed = (None, "no replay") if replay is None else (replay.max_staleness, "four steps' updates, plus sync's")
    yield "sampling.max_staleness", replayed
    if algorithm.expert is not None:
        yield "expert.batch_size", (config.algorithm.batch_size, "algorithm.batch_size")


def _of_supervised(algorithm: SupervisedAlgorithm) -> Iterator[tuple[str, Effective]]:
    preset, absent = f"preset {algorithm.name}", (None, f"no part of {algorithm.name}")
    for section, settings in (("loss", LossConfig), ("expert", ExpertConfig), ("distill", DistillConfig)):
        yield from ((f"{section}.{name}", absent) for name, field in settings.model_fields.items() if not field.default)
    for setting in ("sync.max_staleness", "sampling.max_staleness", "sampling.max_refill", "sampling.overlong_length"):
        yield setting, absent
    if algorithm.pair_loss is None:
        yield "loss.aggregation", (algorithm.aggregation, preset)
    else:
        yield "loss.kl", (algorithm.kl, preset)
        yield "loss.kl_coef", (algorithm.kl_coef, preset)
    for parameter, value in algorithm.pair_loss_args.items():
        yield f"loss.policy_loss_args.{parameter}", (value, preset)


def _of_run(recipe: TrainingRecipe) -> Iterator[tuple[str, Effective]]:
    """Yield the values that are set for every run, or when it starts."""
    config = recipe.config
    yield "name", (None, "Experiment-<time of the start>")
    yield "execution", ("ray" if config.uses_ray else "local", "whether the section cluster is given")
    yield "engine.kv_cache_mb", (None, "at the start: what max_slots needs, at most a quarter of the free memory")
    held_out = "a tenth of train_dataset, at most 512 tasks"
    if isinstance(recipe, RolloutRecipe):
        yield "eval_dataset", (None, held_out if config.evaluation.hold_out else "nothing is held out")


def _parameters(function: Callable[..., Any], configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword parameters of a function with their effective values."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: configured.get(p.name, p.default) for p in parameters if p.kind == p.KEYWORD_ONLY}
