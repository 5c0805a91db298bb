"""The published algorithms by name, each a value made of parts, and how a run's settings override the parts.

In: the configured name, the overrides, the group size. Out: an `Algorithm`. To add one: a pure function for whatever
part is new, a line in `PRESETS`, a test with hand-computed numbers.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from agenttune.algorithm.advantages import AdvantageFunction, CountArray, FloatArray, step_wise_grpo
from agenttune.config.run import Aggregation, KLEstimator, LossConfig
from agenttune.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What is optimized. Fields named as in `LossConfig` mean what they mean there.

    `group_relative`: advantages compare the rollouts of a group, so that a group needs two scored ones.
    `needs_ratio`: the loss divides by the probability a token was sampled with, so that tokens from a truncated
    distribution cannot be used. `source` says where the preset's numbers come from.
    """

    name: str
    advantage: AdvantageFunction
    group_relative: bool = True
    needs_ratio: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: KLEstimator = "none"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token-mean"
    std_normalize: bool = True
    step_norm: bool = False
    allows_step_norm: bool = False
    std_threshold: float | None = None
    source: str

    @property
    def needs_reference(self) -> bool:
        """Whether logprobs of the reference model are used at all."""
        return self.kl != "none" and self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy enters the loss."""
        return self.entropy_coef > 0

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a token with advantage 0 has a gradient at all (of the KL or entropy term)."""
        return self.needs_reference or self.needs_entropy

    def advantages(self, rewards_G: FloatArray, num_calls_G: CountArray) -> FloatArray | None:
        """One advantage for each rollout of a group (G), or None if the group is dropped by `std_threshold`."""
        return self.advantage(
            rewards_G,
            num_calls_G,
            std_normalize=self.std_normalize,
            step_norm=self.step_norm,
            std_threshold=self.std_threshold,
        )


_GRPO = Algorithm(
    name="grpo",
    # Its score per rollout is that of `advantages.grpo`; the step-wise one adds what several calls per rollout need.
    advantage=step_wise_grpo,
    dual_clip=3.0,
    kl="k2",
    kl_coef=0.001,
    source=(
        "GRPO: DeepSeekMath, arXiv 2402.03300. Defaults of Trinity-RFT 0.6.0: `PPOPolicyLossFn` (clip_range 0.2, "
        "clip_ratio_c 3.0, loss_agg_mode token-mean), `KLFn` (k2, kl_coef 0.001), entropy_coef 0. "
        "Left out: a lone run scored by its raw reward."
    ),
)

PRESETS: dict[str, Algorithm] = {
    "grpo": _GRPO,
    "multi_step_grpo": replace(
        _GRPO,
        name="multi_step_grpo",
        allows_step_norm=True,
        source=_GRPO.source
        + " Advantages: `step_wise_grpo` (epsilon 1e-6, enable_step_norm false, std_threshold none).",
    ),
}


def resolve(algorithm_type: str, loss: LossConfig, group_size: int) -> Algorithm:
    """The named preset with the overrides of `loss` applied.

    Raises `ConfigError` for an unknown name, a group size of one with a group-relative algorithm, and an override that
    would have no effect.
    """
    if algorithm_type not in PRESETS:
        nearest = difflib.get_close_matches(algorithm_type, PRESETS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown algorithm_type {algorithm_type!r}; did you mean {nearest!r}? Known: {', '.join(sorted(PRESETS))}"
        )
    preset = PRESETS[algorithm_type]
    if preset.group_relative and group_size < 2:
        raise ConfigError(
            f"group_size is {group_size}, but {algorithm_type!r} compares the rollouts of a task with each other: "
            "set algorithm.group_size to at least 2"
        )
    overrides = loss.model_dump(exclude_none=True)
    if overrides.get("step_norm") and not preset.allows_step_norm:
        raise ConfigError(f"loss.step_norm has no effect in {algorithm_type!r}: use algorithm_type 'multi_step_grpo'")
    if overrides.get("kl") == "none":
        if overrides.get("kl_coef"):
            raise ConfigError(
                f"loss.kl_coef is {overrides['kl_coef']}, but loss.kl is 'none': choose k1, k2 or k3, or drop kl_coef"
            )
        overrides["kl_coef"] = 0.0
    return replace(preset, **overrides)
