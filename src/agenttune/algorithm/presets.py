"""The published algorithms by name, each a value made of parts, and how a run's settings override the parts.

In: the configured name, the overrides, the group size. Out: an `Algorithm`. To add one: a pure function for whatever
part is new (`advantages`, `losses`), a line in `PRESETS`, a test with hand-computed numbers.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agenttune.algorithm.advantages import ADVANTAGES, FloatArray, IndexArray, Scores
from agenttune.algorithm.behaviour import CORRECTIONS
from agenttune.algorithm.losses import POLICY_LOSSES
from agenttune.algorithm.shaping import Shaping
from agenttune.config.run import Aggregation, Behaviour, KLEstimator, KLPlace, LossConfig, SamplingConfig
from agenttune.errors import ConfigError

_OF_POLICY_LOSS = ("clip_low", "clip_high", "dual_clip")
_OF_ADVANTAGE = ("std_normalize", "step_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What is optimized: an advantage and a policy loss by name with their parameters (absent ones have the
    function's defaults), and further terms, which mean what they mean in `LossConfig`. Groups of a step that
    are left out are replaced by those of up to `max_refill` times as many further tasks as a step has; `shaping` is
    what happens to rewards before.

    `source` says where the preset's numbers come from.
    """

    name: str
    advantage: str = "grpo"
    advantage_args: Mapping[str, Any] = field(default_factory=dict)
    policy_loss: str = "ppo"
    policy_loss_args: Mapping[str, Any] = field(default_factory=dict)
    kl: KLEstimator = "none"
    kl_coef: float = 0.0
    kl_in: KLPlace = "loss"
    kl_target: float | None = None
    kl_horizon: int = 10_000
    behaviour: Behaviour = "none"
    behaviour_low: float | None = None
    behaviour_high: float | None = None
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token-mean"
    constant_length: int | None = None
    std_threshold: float | None = None
    max_refill: float = 0.0
    shaping: Shaping = field(default_factory=Shaping)
    source: str

    @property
    def group_relative(self) -> bool:
        """Whether advantages compare the rollouts of a group, so that a group needs two scored ones."""
        return ADVANTAGES[self.advantage].group_relative

    @property
    def centred(self) -> bool:
        """Whether the advantages of a group's rollouts add up to zero."""
        return ADVANTAGES[self.advantage].centred and not self.advantage_args.get("step_norm", False)

    @property
    def uses_call_rewards(self) -> bool:
        """Whether rewards that a workflow gives its calls one by one reach the advantages."""
        return ADVANTAGES[self.advantage].per_call

    @property
    def needs_ratio(self) -> bool:
        """Whether the loss divides by the probability that a token was sampled with."""
        return POLICY_LOSSES[self.policy_loss].needs_ratio

    @property
    def by_call(self) -> bool:
        """Whether the loss needs to know which call each token belongs to."""
        return POLICY_LOSSES[self.policy_loss].by_call

    @property
    def needs_reference(self) -> bool:
        """Whether logprobs of the reference model are used at all."""
        return self.kl != "none" and self.kl_coef > 0

    @property
    def needs_baseline(self) -> bool:
        """Whether each group needs a greedy rollout beside it."""
        return ADVANTAGES[self.advantage].baseline

    @property
    def needs_critic(self) -> bool:
        """Whether the trainer makes the advantages of single tokens with a critic; `advantages` then gives the rewards
        that they are made from."""
        return ADVANTAGES[self.advantage].of_tokens is not None

    @property
    def scores_tokens(self) -> bool:
        """Whether the trainer adds to the advantages what it alone knows: a critic's values, KL penalties."""
        return self.needs_critic or (self.needs_reference and self.kl_in == "reward")

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy enters the loss."""
        return self.entropy_coef > 0

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a token with advantage 0 has a gradient at all (of the KL or entropy term, or by a critic)."""
        return self.needs_reference or self.needs_entropy or self.needs_critic

    def most_further(self, batch_size: int) -> int:
        """How many further tasks a step of `batch_size` tasks may roll out in place of groups that are left out."""
        return int(self.max_refill * batch_size)

    def advantages(self, scores: Scores) -> FloatArray:
        """One advantage for each trained call of a step (C); with a critic the reward that comes after it."""
        return ADVANTAGES[self.advantage].function(scores, **({} if self.needs_critic else self.advantage_args))

    def token_advantages(
        self, rewards_S: FloatArray, values_S: FloatArray, rollouts_S: IndexArray
    ) -> tuple[FloatArray, FloatArray]:
        """Advantages and returns of a step's tokens (S), by the critic's values; only if `needs_critic`."""
        function = ADVANTAGES[self.advantage].of_tokens
        assert function is not None, f"{self.advantage} makes no use of a critic"
        return function(rewards_S, values_S, rollouts_S, **self.advantage_args)


_TRINITY = "Defaults of Trinity-RFT 0.6.0: KL k2 with coefficient 0.001 in the loss, no entropy term"
_GRPO = Algorithm(
    name="grpo",
    policy_loss_args={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
    kl="k2",
    kl_coef=0.001,
    source=f"GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1. {_TRINITY}, clip 0.2, dual clip 3, token-mean.",
)


def _like_grpo(name: str, source: str, **parts: Any) -> Algorithm:
    """GRPO's KL term and what else is not said otherwise."""
    if "policy_loss" in parts:
        parts.setdefault("policy_loss_args", {})
    return replace(_GRPO, name=name, source=f"{source} {_TRINITY}.", **parts)


_ALGORITHMS = (
    _GRPO,
    _like_grpo("grpo_verl", "As grpo; the name of verl's implementation in Trinity-RFT."),
    _like_grpo("multi_step_grpo", "`step_wise_grpo` of Trinity-RFT 0.6.0, step norm off.", advantage="step_wise_grpo"),
    Algorithm(
        name="dr_grpo",
        advantage_args={"std_normalize": False},
        aggregation="constant-length",
        source="Dr. GRPO, arXiv 2503.20783, section 3.2 and appendix A; clip 0.2; no KL.",
    ),
    Algorithm(
        name="dapo",
        policy_loss_args={"clip_low": 0.2, "clip_high": 0.28},
        std_threshold=0.0,
        max_refill=4.0,
        source="DAPO, arXiv 2503.14476, equation 8: clip 0.2 / 0.28, token-mean, no KL; groups without spread are "
        "replaced by further ones (equation 11). The over-long punishment of equation 13 is a setting (sampling).",
    ),
    _like_grpo(
        "ppo",
        "PPO, arXiv 1707.06347, equation 7, with GAE, arXiv 1506.02438, equation 16; γ 1, λ 0.95; needs a "
        "critic (settings: critic).",
        advantage="gae",
    ),
    _like_grpo(
        "decoupled_ppo",
        "Decoupled PPO, arXiv 2110.00641, as in AReaL, arXiv 2505.24298; else as ppo.",
        advantage="gae",
        behaviour="plain",
    ),
    _like_grpo("rloo", "RLOO: 'Back to Basics', arXiv 2402.14740, equation 4.", advantage="rloo"),
    _like_grpo(
        "icepop",
        "IcePop: Ring-1T, arXiv 2510.18855: tokens that engine and trainer weigh differently (outside 0.5 / 5) are not "
        "trained.",
        behaviour="masked",
        behaviour_low=0.5,
        behaviour_high=5.0,
    ),
    Algorithm(
        name="reinforce",
        advantage="reinforce",
        policy_loss="reinforce",
        aggregation="rollout-mean",
        source="REINFORCE, R. Williams 1992, without a baseline.",
    ),
    Algorithm(
        name="remax",
        advantage="remax",
        policy_loss="reinforce",
        source="ReMax, arXiv 2310.10505, algorithm 1: one greedy rollout more for each task and step; without its KL "
        "penalty (loss.kl k1 with loss.kl_in reward adds it).",
    ),
    _like_grpo(
        "reinforceplusplus",
        "REINFORCE++, arXiv 2501.03262, equations 5 and 6; the statistics' unit is the rollout.",
        advantage="reinforceplusplus",
    ),
    _like_grpo(
        "reinforceplusplus_baseline",
        "REINFORCE++ with baseline, arXiv 2501.03262, section 3.",
        advantage="grpo_batch_std",
    ),
    _like_grpo(
        "gspo",
        "GSPO, arXiv 2507.18071, equations 5, 7 and 14; clip 3e-4 / 4e-4.",
        policy_loss="gspo",
        aggregation="sequence-mean-token-mean",
    ),
    _like_grpo("cispo", "CISPO: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.", policy_loss="cispo"),
    _like_grpo("sapo", "SAPO, arXiv 2511.20347, equations 5 and 6; τ 1 / 1.05.", policy_loss="sapo"),
    _like_grpo("topr", "TOPR, arXiv 2503.14286, equation 5.", advantage="reinforce", policy_loss="topr"),
    _like_grpo("opmd", "OPMD: Kimi k1.5, arXiv 2501.12599, equation 3.", advantage="opmd", policy_loss="opmd"),
    Algorithm(
        name="asymre",
        advantage="asymre",
        policy_loss="opmd",
        source="AsymRE, arXiv 2506.20520, equation 4; baseline shift -0.1; loss and τ of Trinity-RFT 0.6.0.",
    ),
    Algorithm(name="sppo", advantage="opmd", policy_loss="sppo", source="`sppo` of Trinity-RFT 0.6.0: ε 0.3, no KL."),
    Algorithm(
        name="rec", advantage="rec", policy_loss="rec", source="REC-OneSide-NoIS, arXiv 2509.24203; clip 0.2; no KL."
    ),
    Algorithm(
        name="raft",
        advantage="best_of_group",
        policy_loss="sft",
        source="RAFT, arXiv 2304.06767, algorithm 1: fine-tuning on the best rollouts of each group.",
    ),
    Algorithm(
        name="gigpo",
        advantage="gigpo",
        policy_loss_args={"clip_low": 0.2, "clip_high": 0.2},
        kl="low_var_kl",
        kl_coef=0.01,
        source="GiGPO, arXiv 2505.10978, equations 3 to 8; ω 1; KL 0.01 as in its appendix.",
    ),
)

PRESETS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _ALGORITHMS}


def resolve(
    algorithm_type: str,
    loss: LossConfig,
    group_size: int,
    *,
    max_tokens: int | None = None,
    sampling: SamplingConfig | None = None,
) -> Algorithm:
    """The named preset with the overrides of `loss` and `sampling` applied; `max_tokens` is the default of
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
    given |= _behaviour_bounds(algorithm, given)
    algorithm = replace(algorithm, **given)
    _check_terms(algorithm, given)
    if algorithm.aggregation != "constant-length":
        if algorithm.constant_length is not None:
            raise ConfigError("loss.constant_length has no effect: loss.aggregation is not 'constant-length'")
        return algorithm
    return replace(algorithm, constant_length=algorithm.constant_length or max_tokens)


def _behaviour_bounds(algorithm: Algorithm, given: Mapping[str, Any]) -> dict[str, float | None]:
    """The bounds of the behaviour weight: those given, those of the preset, or the correction's own."""
    name = given.get("behaviour", algorithm.behaviour)
    if name != "none" and not algorithm.needs_ratio:
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
