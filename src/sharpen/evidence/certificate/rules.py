"""What the settings require of a step, read with a table of the certificate's own.

In: a run's configuration. Out: `Rules`. The table repeats, for each algorithm, what determines a token's advantage and
weight; `algorithm.presets` is not read, so that a mistake there shows as a difference here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.config.run import RunConfig
from sharpen.evidence.certificate.brought import algorithm_of, formula_of
from sharpen.evidence.certificate.formulas import FORMULAS, Formula

_TOKENS, _SEQUENCES = "token-mean", "sequence-mean-token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The part of an algorithm that the certificate recomputes."""

    advantage: str = "grpo"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = _TOKENS
    std_threshold: float | None = None
    max_refill: float = 0.0
    teacher: bool = False
    expert: bool = False
    kl_in: str = "loss"


PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(),
    "grpo_verl": Preset(),
    "multi_step_grpo": Preset(advantage="step_wise_grpo"),
    "dr_grpo": Preset(arguments={"std_normalize": False}, aggregation="constant-length"),
    "dapo": Preset(std_threshold=0.0, max_refill=4.0),
    "ppo": Preset(advantage="gae"),
    "decoupled_ppo": Preset(advantage="gae"),
    "rloo": Preset(advantage="rloo"),
    "maxrl": Preset(advantage="maxrl"),
    "otb": Preset(advantage="otb"),
    "gdpo": Preset(advantage="gdpo"),
    "icepop": Preset(aggregation=_SEQUENCES),
    "reinforce": Preset(advantage="reinforce", aggregation="rollout-mean"),
    "remax": Preset(advantage="remax"),
    "rae": Preset(advantage="rae", aggregation="constant-length"),
    "reinforceplusplus": Preset(advantage="reinforceplusplus"),
    "reinforceplusplus_baseline": Preset(advantage="grpo_batch_std"),
    "gspo": Preset(aggregation=_SEQUENCES),
    "cispo": Preset(),
    "sapo": Preset(aggregation=_SEQUENCES),
    "m2po": Preset(),
    "topr": Preset(advantage="reinforce"),
    "opmd": Preset(advantage="opmd"),
    "asymre": Preset(advantage="asymre"),
    "dppo": Preset(),
    "vespo": Preset(),
    "sppo": Preset(advantage="opmd"),
    "rec": Preset(advantage="rec"),
    "raft": Preset(advantage="best_of_group"),
    "mix": Preset(expert=True),
    "mix_chord": Preset(expert=True),
    "on_policy_distill": Preset(advantage="none", teacher=True),
    "jsd": Preset(advantage="none", aggregation=_SEQUENCES, teacher=True),
    "gigpo": Preset(advantage="gigpo"),
}
"""Presets by their name in `algorithm.algorithm_type`."""

_SHORTHANDS = ("std_normalize", "step_norm")
"""Arguments of advantages that also have a setting of their own in `loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What determines which calls of a step train, with which advantage and which weight."""

    advantage: str = "grpo"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = _TOKENS
    constant_length: int | None = None
    std_threshold: float | None = None
    most_further: int = 0
    group_size: int
    batch_size: int | None = None
    num_minibatches: int = 1
    drop_truncated: bool = False
    overlong_cache: int | None = None
    overlong_length: int = 0
    overlong_penalty: float = 1.0
    length_penalty: float = 0.0
    turns_penalty: float = 0.0
    reward_low: float | None = None
    reward_high: float | None = None
    replayed_groups: int = 0
    replay_by_signal: bool = True
    seed: int = 0
    kl_in_reward: bool = False
    teacher: bool = False
    expert: bool = False
    frozen: Mapping[str, int | None] = field(default_factory=dict)
    """The agents whose policies do not train; of one that follows the trained policy, the versions after which it is
    renewed."""

    @classmethod
    def of(cls, config: RunConfig) -> Rules:
        """Return the rules that a run's settings define."""
        preset = _preset(config.algorithm.algorithm_type)
        loss, sampling, batch_size = config.loss, config.sampling, config.algorithm.batch_size
        advantage = loss.advantage or preset.advantage
        arguments = dict(preset.arguments) if loss.advantage is None else {}
        arguments |= loss.advantage_args
        arguments |= {name: value for name in _SHORTHANDS if (value := getattr(loss, name)) is not None}
        refill = preset.max_refill if sampling.max_refill is None else sampling.max_refill
        return cls(
            advantage=advantage,
            arguments=arguments,
            aggregation=loss.aggregation or preset.aggregation,
            constant_length=loss.constant_length or config.model.max_tokens,
            std_threshold=preset.std_threshold if loss.std_threshold is None else loss.std_threshold,
            most_further=int(refill * batch_size),
            group_size=config.algorithm.group_size,
            batch_size=batch_size,
            num_minibatches=config.trainer.num_minibatches,
            drop_truncated=sampling.overlong_filter,
            overlong_cache=sampling.overlong_cache,
            overlong_length=sampling.overlong_length or config.model.max_tokens,
            overlong_penalty=sampling.overlong_penalty,
            length_penalty=sampling.length_penalty or 0.0,
            turns_penalty=sampling.turns_penalty or 0.0,
            reward_low=sampling.reward_low,
            reward_high=sampling.reward_high,
            replayed_groups=int(sampling.replay_share * batch_size),
            replay_by_signal=sampling.replay_priority == "signal",
            seed=config.seed,
            kl_in_reward=(loss.kl_in or preset.kl_in) == "reward",
            teacher=preset.teacher,
            expert=preset.expert,
            frozen={name: policy.every for name, policy in config.policies.items()},
        )

    @property
    def formula(self) -> Formula:
        """The advantage's formula. Raises `ConfigError` for one that nobody has."""
        return FORMULAS[self.advantage] if self.advantage in FORMULAS else formula_of(self.advantage)

    @property
    def centred(self) -> bool:
        """Whether the advantages of a group's rollouts add up to zero."""
        return self.formula.centred and not self.arguments.get("step_norm", False)

    @property
    def formula_arguments(self) -> Mapping[str, Any]:
        """The arguments of the formula. Those of a critic and of the entropy clip are for the trainer, not for the
        formula."""
        return {} if self.formula.critic or self.formula.entropy_clip else self.arguments


def _preset(name: str) -> Preset:
    """Return the preset of an algorithm, ours or one that the user brings."""
    if name in PRESETS:
        return PRESETS[name]
    found = algorithm_of(name)
    return Preset(
        advantage=found.advantage,
        arguments=found.advantage_args,
        aggregation=found.aggregation,
        std_threshold=found.std_threshold,
        max_refill=found.max_refill,
        kl_in=found.kl_in,
    )
