"""A preset with a run's settings applied.

In: the configured name, the overrides, the group size. Out: an `Algorithm`. A setting that would have no effect is
refused.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sharpen.algorithm.advantages import ADVANTAGES
from sharpen.algorithm.behaviour import CORRECTIONS
from sharpen.algorithm.distill import check_without_rewards
from sharpen.algorithm.distill import configured as configured_distill
from sharpen.algorithm.expert import configured as configured_expert
from sharpen.algorithm.losses import POLICY_LOSSES
from sharpen.algorithm.presets import PRESETS, Algorithm
from sharpen.algorithm.shaping import Shaping
from sharpen.config.run import Behaviour, DistillConfig, ExpertConfig, LossConfig, RunConfig, SamplingConfig
from sharpen.errors import ConfigError

_OF_POLICY_LOSS = ("clip_low", "clip_high", "dual_clip")
_OF_ADVANTAGE = ("std_normalize", "step_norm")

TIGHT_CLIP = 0.05
"""Bounds on a ratio that are narrower than this clip rounding: engine and trainer differ by hundredths of a nat in
bfloat16, so the ratio must be to the trainer's own logprobs."""


def algorithm_of(config: RunConfig) -> Algorithm:
    """The algorithm of a run; see `resolve`."""
    return resolve(
        config.algorithm.algorithm_type,
        config.loss,
        config.algorithm.group_size,
        max_tokens=config.model.max_tokens,
        sampling=config.sampling,
        expert=config.expert,
        distill=config.distill,
    )


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
    """The named preset with the overrides of the sections applied; `max_tokens` is the default of
    `constant_length` and of the length that over-long shaping looks at.

    Raises `ConfigError` for an unknown name, a group size of one with a group-relative algorithm, and an override that
    would have no effect.
    """
    preset = PRESETS[_known(algorithm_type, PRESETS, "algorithm_type")]
    given = loss.model_dump(exclude_none=True)
    algorithm = replace(
        preset,
        **_part(preset, given, "advantage", _OF_ADVANTAGE, {name: one.configured for name, one in ADVANTAGES.items()}),
        **_part(
            preset, given, "policy_loss", _OF_POLICY_LOSS, {name: one.function for name, one in POLICY_LOSSES.items()}
        ),
    )
    if algorithm.group_relative and group_size < 2:
        raise ConfigError(
            f"group_size is {group_size}, but {algorithm_type!r} compares the rollouts of a task with each other: "
            "set algorithm.group_size to at least 2"
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
    _check_terms(algorithm, given)
    if not algorithm.needs_reward:
        check_without_rewards(algorithm_type, algorithm.distill, loss, sampling)
    if algorithm.aggregation != "constant-length":
        if algorithm.constant_length is not None:
            raise ConfigError("loss.constant_length has no effect: loss.aggregation is not 'constant-length'")
        return algorithm
    return replace(algorithm, constant_length=algorithm.constant_length or max_tokens)


def default_behaviour(algorithm: Algorithm) -> Behaviour:
    """The behaviour weight where no setting says one: the preset's; else `truncated` with a clip so tight that it would
    hold rounding against the engine's records, not what the policy has changed."""
    if algorithm.behaviour != "none":
        return algorithm.behaviour
    bound = POLICY_LOSSES[algorithm.policy_loss].narrowest_bound(algorithm.policy_loss_args)
    return "truncated" if bound < TIGHT_CLIP else "none"


def as_trained(preset: Algorithm) -> Algorithm:
    """A preset as it trains where no setting says otherwise."""
    chosen: dict[str, Any] = {"behaviour": default_behaviour(preset)}
    return replace(preset, **(chosen | _behaviour_bounds(preset, chosen)))


def _behaviour_bounds(algorithm: Algorithm, given: Mapping[str, Any]) -> dict[str, float | None]:
    """The bounds of the behaviour weight: those given, those of the preset, or the correction's own."""
    name = given.get("behaviour", algorithm.behaviour)
    if name != "none" and not POLICY_LOSSES[algorithm.policy_loss].needs_ratio:
        raise ConfigError(
            f"loss.behaviour is {name!r}, but the policy loss {algorithm.policy_loss!r} has no probability ratio to "
            "correct: leave it out, or choose another policy loss"
        )
    bounds: dict[str, float | None] = {}
    for side in ("low", "high"):
        setting = f"behaviour_{side}"
        own = getattr(CORRECTIONS[name], side) if name != "none" else None
        if own is None and setting in given:
            raise ConfigError(f"loss.{setting} has no effect: loss.behaviour is {name!r}")
        kept = getattr(algorithm, setting) if name == algorithm.behaviour else None
        bounds[setting] = given.get(setting, own if kept is None else kept)
    return bounds


def _check_terms(algorithm: Algorithm, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for settings of the KL term that would have no effect."""
    for setting in ("kl_in", "kl_target", "kl_horizon"):
        if setting in given and not algorithm.needs_reference:
            raise ConfigError(
                f"loss.{setting} has no effect: there is no KL term (loss.kl {algorithm.kl!r}, loss.kl_coef "
                f"{algorithm.kl_coef:g})"
            )
    if "kl_horizon" in given and algorithm.kl_target is None:
        raise ConfigError("loss.kl_horizon has no effect: set loss.kl_target too")


def _part(
    preset: Algorithm,
    given: dict[str, Any],
    part: str,
    shorthands: tuple[str, ...],
    functions: Mapping[str, Callable[..., Any]],
) -> dict[str, Any]:
    """Name and parameters of one part; takes what concerns it out of `given`."""
    name, arguments = getattr(preset, part), dict(getattr(preset, f"{part}_args"))
    if part in given:
        name, arguments = _known(given.pop(part), functions, f"loss.{part}"), {}
    parameters = [p.name for p in inspect.signature(functions[name]).parameters.values() if p.kind == p.KEYWORD_ONLY]
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


def _known(name: str, known: Mapping[str, Any], setting: str) -> str:
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown {setting} {name!r}; did you mean {nearest!r}? Known: {', '.join(sorted(known))}")
    return name
