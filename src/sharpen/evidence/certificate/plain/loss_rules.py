"""The loss that the settings require, read with a table of the certificate's own.

In: a run's configuration. Out: `LossRules`. The table repeats what `docs/reference/algorithms.md` says of each
algorithm's loss; `algorithm.presets` is not read, so that a mistake there shows as a difference here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.config.run import RunConfig
from sharpen.evidence.certificate.brought import algorithm_of, narrowest_bound

_GRPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """What the loss of a token is made of, see `LossConfig`; `arguments` are those of the policy loss that differ from
    its own defaults. Bounds of the behaviour weight are None where it has none."""

    policy_loss: str = "ppo"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kl: str = "none"
    kl_coef: float = 0.0
    kl_in_reward: bool = False
    kl_target: float | None = None
    kl_horizon: int = 10_000
    behaviour: str = "none"
    behaviour_low: float | None = None
    behaviour_high: float | None = None
    entropy_coef: float = 0.0
    echo: float = 0.0
    sequence_mask: float | None = None

    @classmethod
    def of(cls, config: RunConfig) -> LossRules:
        """Return the loss that a run's settings define."""
        preset, loss = _preset(config.algorithm.algorithm_type), config.loss
        arguments = dict(preset.arguments) if loss.policy_loss is None else {}
        arguments |= loss.policy_loss_args
        arguments |= {name: value for name in _GRPO_CLIP if (value := getattr(loss, name)) is not None}
        kl = loss.kl or preset.kl
        coefficient = 0.0 if kl == "none" else preset.kl_coef if loss.kl_coef is None else loss.kl_coef
        policy_loss = loss.policy_loss or preset.policy_loss
        behaviour = loss.behaviour or preset.behaviour
        if loss.behaviour is None and behaviour == "none" and _narrowest(policy_loss, arguments) < _TIGHT:
            behaviour = "truncated"
        low, high = _BOUNDS.get(behaviour, (None, None))
        if behaviour == preset.behaviour:
            low, high = preset.behaviour_low or low, preset.behaviour_high or high
        return cls(
            policy_loss=policy_loss,
            arguments=arguments,
            kl=kl if coefficient else "none",
            kl_coef=coefficient,
            kl_in_reward=preset.kl_in_reward if loss.kl_in is None else loss.kl_in == "reward",
            kl_target=loss.kl_target or preset.kl_target,
            kl_horizon=loss.kl_horizon or preset.kl_horizon,
            behaviour=behaviour,
            behaviour_low=low if loss.behaviour_low is None else loss.behaviour_low,
            behaviour_high=high if loss.behaviour_high is None else loss.behaviour_high,
            entropy_coef=preset.entropy_coef if loss.entropy_coef is None else loss.entropy_coef,
            echo=loss.echo or preset.echo,
            sequence_mask=preset.sequence_mask if loss.sequence_mask is None else loss.sequence_mask,
        )


_BOUNDS: Mapping[str, tuple[float | None, float | None]] = {"truncated": (None, 2.0), "masked": (0.5, 5.0)}
"""The default bounds of the behaviour weights that have some."""


_TIGHT = 0.05
"""Rounding alone would reach a clip of the ratio that is narrower than this."""
_CLIPS: Mapping[str, Mapping[str, float]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "dppo_tv": {"low": 0.15, "high": 0.15},
    "sppo": {"epsilon": 0.3},
    "rec": {"clip_low": 0.2, "clip_high": 0.2},
}
"""How far the ratio may be from 1 before a token has no gradient, by policy loss, unless set otherwise; of `dppo_tv`,
how far the probability may move."""


def _narrowest(policy_loss: str, arguments: Mapping[str, Any]) -> float:
    """Return the smallest of a loss's clips; infinite if it has none, and 0 for `vespo`, whose ratio adds up the
    rounding of a whole call."""
    if not is_ours(policy_loss):
        return narrowest_bound(policy_loss, arguments)
    if policy_loss == "vespo":
        return 0.0
    if arguments.get("clip") == "none":
        return math.inf
    return min((arguments.get(name, usual) for name, usual in _CLIPS.get(policy_loss, {}).items()), default=math.inf)


def _with_kl(policy_loss: str, **others: Any) -> LossRules:
    """The KL term of Trinity-RFT's defaults beside another loss."""
    return LossRules(policy_loss=policy_loss, kl="k2", kl_coef=0.001, **others)


_GRPO = _with_kl("ppo", arguments=_GRPO_CLIP)

PRESETS: Mapping[str, LossRules] = {
    "grpo": _GRPO,
    "grpo_verl": _GRPO,
    "multi_step_grpo": _GRPO,
    "dr_grpo": LossRules(),
    "dapo": LossRules(arguments={"clip_low": 0.2, "clip_high": 0.28}),
    "ppo": _GRPO,
    "decoupled_ppo": _with_kl("ppo", arguments=_GRPO_CLIP, behaviour="plain"),
    "rloo": _GRPO,
    "maxrl": LossRules(arguments={"clip_low": 0.2, "clip_high": 0.2}),
    "gdpo": LossRules(arguments={"clip_low": 0.2, "clip_high": 0.2}),
    "otb": LossRules(arguments={"clip_low": 0.2, "clip_high": 0.2}),
    "icepop": LossRules(behaviour="masked", behaviour_low=0.5, behaviour_high=5.0),
    "reinforce": LossRules(policy_loss="reinforce"),
    "remax": LossRules(policy_loss="reinforce"),
    "rae": LossRules(arguments={"clip_low": 0.2, "clip_high": 0.2}),
    "reinforceplusplus": _GRPO,
    "reinforceplusplus_baseline": _GRPO,
    "gspo": _with_kl("gspo"),
    "cispo": _with_kl("cispo"),
    "sapo": _with_kl("sapo"),
    "m2po": _with_kl("m2po"),
    "topr": _with_kl("topr"),
    "opmd": _with_kl("opmd"),
    "asymre": LossRules(policy_loss="opmd"),
    "dppo": LossRules(policy_loss="dppo_tv"),
    "vespo": LossRules(policy_loss="vespo"),
    "sppo": LossRules(policy_loss="sppo"),
    "rec": LossRules(policy_loss="rec"),
    "raft": LossRules(policy_loss="sft"),
    "mix": _GRPO,
    "mix_chord": _GRPO,
    "on_policy_distill": LossRules(arguments=_GRPO_CLIP),
    "jsd": LossRules(policy_loss="reinforce"),
    "gigpo": LossRules(arguments={"clip_low": 0.2, "clip_high": 0.2}, kl="low_var_kl", kl_coef=0.01),
}
"""The losses of the algorithms, by their name in `algorithm.algorithm_type`."""


POLICY_LOSSES = frozenset(
    {
        *("ppo", "gspo", "cispo", "sapo", "sapo_gate", "topr", "opmd", "reinforce", "sft", "importance_sampling"),
        *("m2po", "sppo", "rec", "dppo_tv", "dppo_kl", "vespo"),
    }
)
"""The names of our own policy losses."""


def is_ours(policy_loss: str) -> bool:
    """Whether a policy loss is one of ours, or one that the user brings."""
    return policy_loss in POLICY_LOSSES


def _preset(name: str) -> LossRules:
    """Return the loss of an algorithm, ours or one that the user brings."""
    if name in PRESETS:
        return PRESETS[name]
    found = algorithm_of(name)
    return LossRules(
        policy_loss=found.policy_loss,
        arguments=found.policy_loss_args,
        kl=found.kl,
        kl_coef=found.kl_coef,
        kl_in_reward=found.kl_in == "reward",
        kl_target=found.kl_target,
        kl_horizon=found.kl_horizon,
        behaviour=found.behaviour,
        behaviour_low=found.behaviour_low,
        behaviour_high=found.behaviour_high,
        entropy_coef=found.entropy_coef,
        echo=found.echo or 0.0,
        sequence_mask=found.sequence_mask,
    )
