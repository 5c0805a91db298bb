"""Applies a run's settings to a preset.

In: the configured name, the overrides, the group size. Out: an `Algorithm`. Settings that would have no effect are
errors.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sharpen.config.distill import DistillConfig
from sharpen.config.doors import names
from sharpen.config.problems import Problems
from sharpen.config.run import Behaviour, ExpertConfig, LossConfig, SamplingConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.advantages import ADVANTAGES, Advantage, advantage_named
from sharpen.learning.algorithm.aggregation import AGGREGATIONS, aggregation_named
from sharpen.learning.algorithm.behaviour import CORRECTIONS
from sharpen.learning.algorithm.distill import check_without_rewards
from sharpen.learning.algorithm.distill import configured as configured_distill
from sharpen.learning.algorithm.expert import configured as configured_expert
from sharpen.learning.algorithm.kl import ESTIMATORS, estimator
from sharpen.learning.algorithm.losses import POLICY_LOSSES, PolicyLoss, policy_loss_named
from sharpen.learning.algorithm.presets import PRESETS, Algorithm, algorithm_named
from sharpen.learning.algorithm.shaping import Shaping

_POLICY_LOSS_SHORTHANDS = ("clip_low", "clip_high", "dual_clip")
_ADVANTAGE_SHORTHANDS = ("std_normalize", "step_norm")

TIGHT_CLIP = 0.05
"""A clip narrower than this needs a ratio to the trainer's own logprobs: in bfloat16, engine and trainer differ by
hundredths of a nat, so a ratio to the engine's logprobs would be clipped because of rounding."""


def resolve(
    algorithm_type: str,
    loss: LossConfig,
    group_size: int,
    *,
    max_tokens: int | None = None,
    sampling: SamplingConfig | None = None,
    expert: ExpertConfig | None = None,
    distill: DistillConfig | None = None,
) -> Algorithm:
    """Apply the overrides of the configuration's sections to the named preset. `max_tokens` is the default of
    `constant_length` and of the length for over-long shaping.

    Raises `ConfigError` for an unknown name, a part of somebody else's that cannot be used, a group size of 1 with a
    group-relative algorithm, or an override that would have no effect.
    """
    preset = _named_parts(algorithm_type, loss)
    given = loss.model_dump(exclude_none=True)
    algorithm = replace(
        preset,
        **_resolve_part(preset, given, "advantage", _ADVANTAGE_SHORTHANDS, advantage_named),
        **_resolve_part(preset, given, "policy_loss", _POLICY_LOSS_SHORTHANDS, policy_loss_named),
    )
    _check_weights(algorithm)
    _check_roles(algorithm)
    if algorithm.group_relative and group_size < 2:
        raise ConfigError(
            f"group_size is {group_size}, but {algorithm_type!r} compares the rollouts of a task with each other: "
            "set algorithm.group_size to at least 2"
            + (", or loss.advantage to every_rollout, which imitates all" if algorithm_type == "raft" else "")
        )
    if given.get("kl") == "none":
        if given.get("kl_coef"):
            raise ConfigError(
                f"loss.kl_coef is {given['kl_coef']}, but loss.kl is 'none': choose an estimator, or drop kl_coef"
            )
        given["kl_coef"] = 0.0
    if sampling is not None:
        given["shaping"] = Shaping.of(sampling, max_tokens)
        given["max_refill"] = algorithm.max_refill if sampling.max_refill is None else sampling.max_refill
    given = {"behaviour": default_behaviour(algorithm)} | given
    given |= _behaviour_bounds(algorithm, given)
    if expert is not None:
        given["expert"] = configured_expert(algorithm.expert, expert, algorithm_type)
    given["distill"] = configured_distill(algorithm_type, algorithm.distill, distill)
    algorithm = replace(algorithm, **given)
    if algorithm.expert is not None and algorithm.aggregation not in AGGREGATIONS:
        raise ConfigError(f"loss.aggregation is {algorithm.aggregation!r}: an expert's rows need one of ours")
    _check_terms(algorithm, given)
    if not algorithm.needs_reward:
        check_without_rewards(algorithm_type, algorithm.advantage, algorithm.distill, loss, sampling)
    if algorithm.aggregation != "constant-length":
        if algorithm.constant_length is not None:
            raise ConfigError("loss.constant_length has no effect: loss.aggregation is not 'constant-length'")
        return algorithm
    return replace(algorithm, constant_length=algorithm.constant_length or max_tokens)


def _check_weights(algorithm: Algorithm) -> None:
    """Raise `ConfigError` unless the weights of named rewards are numbers by name."""
    weights = algorithm.advantage_args.get("weights")
    if weights is None or not algorithm.of_advantage.by_name:
        return
    numbers = isinstance(weights, Mapping) and all(
        isinstance(name, str) and isinstance(one, int | float) and math.isfinite(one) and one != 0
        for name, one in weights.items()
    )
    if not numbers or not weights:
        raise ConfigError(
            f"loss.advantage_args.weights is {weights!r}: give each reward's name a number that is not 0, such as "
            "{correct: 1.0, format: 0.5}"
        )


def _check_roles(algorithm: Algorithm) -> None:
    """Raise `ConfigError` unless the roles of moving baselines are names of fields, and their decay is below 1."""
    if not algorithm.by_role:
        return
    roles, decay = algorithm.advantage_args.get("roles", ()), algorithm.advantage_args.get("decay", 0.0)
    if not isinstance(roles, list | tuple) or not all(isinstance(name, str) and name for name in roles):
        raise ConfigError(
            f"loss.advantage_args.roles is {roles!r}: give a list of fields of a task's row, such as [game, role]"
        )
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0.0 <= decay < 1.0:
        raise ConfigError(f"loss.advantage_args.decay is {decay!r}: give a number from 0 to below 1, such as 0.95")


def default_behaviour(algorithm: Algorithm) -> Behaviour:
    """Return the default behaviour weight: the preset's, or else `truncated` if the clip is narrower than
    `TIGHT_CLIP`."""
    if algorithm.behaviour != "none":
        return algorithm.behaviour
    bound = algorithm.of_policy_loss.narrowest_bound(algorithm.policy_loss_args)
    return "truncated" if bound < TIGHT_CLIP else "none"


def as_trained(preset: Algorithm) -> Algorithm:
    """Return a preset with the defaults that `resolve` adds."""
    defaults: dict[str, Any] = {"behaviour": default_behaviour(preset)}
    return replace(preset, **(defaults | _behaviour_bounds(preset, defaults)))


def _behaviour_bounds(algorithm: Algorithm, given: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the bounds of the behaviour weight: those set, or those of the preset, or the defaults of the
    correction."""
    name = given.get("behaviour", algorithm.behaviour)
    if name != "none" and not algorithm.of_policy_loss.needs_ratio:
        raise ConfigError(
            f"loss.behaviour is {name!r}, but the policy loss {algorithm.policy_loss!r} has no probability ratio to "
            "correct: leave it out, or choose another policy loss"
        )
    if name != "none" and algorithm.of_policy_loss.mask is not None:
        raise ConfigError(
            f"loss.behaviour is {name!r}, but the policy loss {algorithm.policy_loss!r} itself bounds the ratio to the "
            "recorded logprobs: leave it out"
        )
    bounds: dict[str, float | None] = {}
    for side in ("low", "high"):
        setting = f"behaviour_{side}"
        default = getattr(CORRECTIONS[name], side) if name != "none" else None
        if default is None and setting in given:
            raise ConfigError(f"loss.{setting} has no effect: loss.behaviour is {name!r}")
        preset_bound = getattr(algorithm, setting) if name == algorithm.behaviour else None
        bounds[setting] = given.get(setting, default if preset_bound is None else preset_bound)
    return bounds


def _check_terms(algorithm: Algorithm, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for settings of the KL term and the mask of sequences that would have no effect."""
    for setting in ("kl_in", "kl_target", "kl_horizon"):
        if setting in given and not algorithm.needs_reference:
            raise ConfigError(
                f"loss.{setting} has no effect: there is no KL term (loss.kl {algorithm.kl!r}, loss.kl_coef "
                f"{algorithm.kl_coef:g})"
            )
    if "kl_horizon" in given and algorithm.kl_target is None:
        raise ConfigError("loss.kl_horizon has no effect: set loss.kl_target too")
    pushes = algorithm.needs_reward and algorithm.advantage not in ("best_of_group", "every_rollout")
    if algorithm.sequence_mask is not None and not (pushes or algorithm.teaches_sampled):
        raise ConfigError(
            f"loss.sequence_mask has no effect: no advantage of {algorithm.name!r} is negative (loss.advantage "
            f"{algorithm.advantage!r})"
        )


def _resolve_part(
    preset: Algorithm,
    given: dict[str, Any],
    part: str,
    shorthands: tuple[str, ...],
    part_named: Callable[[str], Advantage | PolicyLoss],
) -> dict[str, Any]:
    """Return the name and parameters of the advantage or policy loss, and remove their settings from `given`."""
    name, arguments = getattr(preset, part), dict(getattr(preset, f"{part}_args"))
    if part in given:
        name, arguments = given.pop(part), {}
    signature = inspect.signature(part_named(name).configured)
    parameters = [p.name for p in signature.parameters.values() if p.kind == p.KEYWORD_ONLY]
    overrides = {f"loss.{part}_args.{key}": (key, value) for key, value in given.pop(f"{part}_args").items()}
    overrides |= {f"loss.{key}": (key, given.pop(key)) for key in shorthands if key in given}
    for setting, (key, value) in overrides.items():
        if key not in parameters:
            raise ConfigError(
                f"{setting} has no effect in {preset.name!r}: its {part} {name!r} takes "
                f"{', '.join(parameters) or 'no parameters'}"
            )
        arguments[key] = value
    return {part: name, f"{part}_args": arguments}


def _named_parts(algorithm_type: str, loss: LossConfig) -> Algorithm:
    """Return the named algorithm, once it and all parts that the settings name are found and can be used. Raises
    `ConfigError` with all problems at once."""
    _known("algorithms", algorithm_type, PRESETS, "algorithm_type")
    problems = Problems()
    algorithm = problems.check(algorithm_named, algorithm_type)
    for name, (kind, ours, part_named) in _KINDS.items():
        chosen = getattr(loss, name) or getattr(algorithm, name, None)
        if chosen is not None and problems.check(_known, kind, chosen, ours, f"loss.{name}") not in (None, "none"):
            problems.check(part_named, chosen)
    problems.raise_found()
    assert algorithm is not None
    return algorithm


_KINDS: Mapping[str, tuple[str, Mapping[str, Any], Callable[[Any], object]]] = {
    "advantage": ("advantages", ADVANTAGES, advantage_named),
    "policy_loss": ("policy_losses", POLICY_LOSSES, policy_loss_named),
    "kl": ("kls", {"none": None, **ESTIMATORS}, estimator),
    "aggregation": ("aggregations", AGGREGATIONS, aggregation_named),
}
"""Of each part: the group of its entry points, ours, and what finds one."""


def _known(kind: str, name: str, ours: Mapping[str, Any], setting: str) -> str:
    known = names(kind, ours)
    if name not in known and ":" not in name:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown {setting} {name!r}; did you mean {nearest!r}? Known: {', '.join(sorted(known))}")
    return name
