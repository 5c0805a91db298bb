"""The published algorithms by name.

Out: `PRESETS`, a dictionary of `Algorithm`s; `resolve` applies a run's settings to one. To add an algorithm, write a
pure function for each new part (`advantages`, `losses`), a line in `PRESETS`, and a test with hand-computed numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sharpen.config.doors import find_part
from sharpen.config.run import Aggregation, Behaviour, KLEstimator, KLPlace
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.advantages import DECAY, Advantage, advantage_named
from sharpen.learning.algorithm.aggregation import TokenWeights
from sharpen.learning.algorithm.clip_entropy import BoolArray
from sharpen.learning.algorithm.distill import Distill
from sharpen.learning.algorithm.expert import Expert
from sharpen.learning.algorithm.kl import KL
from sharpen.learning.algorithm.losses import PolicyLoss, policy_loss_named
from sharpen.learning.algorithm.parts import (
    AdvantageFunction,
    AggregationFunction,
    KLFunction,
    PolicyLossFunction,
    place_of_field,
)
from sharpen.learning.algorithm.returns import FloatArray, IndexArray, Scores
from sharpen.learning.algorithm.role_baseline import role_of
from sharpen.learning.algorithm.second_moment import Kept
from sharpen.learning.algorithm.shaping import Shaping
from sharpen.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm: an advantage and a policy loss by name, with their arguments (others have the function's defaults),
    and further terms, which are described in `LossConfig`.

    Somebody else's algorithm may hold its own parts themselves in place of names: `advantage`, `policy_loss`, `kl` and
    `aggregation`. In a run they have names again, by which every process finds them (`algorithm_named`).

    To replace groups that are left out of a step, up to `max_refill` times the step's tasks are rolled out in addition.
    `shaping` changes rewards before advantages are computed; `expert` and `distill` add an expert's rows and a teacher.
    `source` is where the preset's numbers come from.
    """

    name: str
    advantage: str | Advantage | AdvantageFunction = "grpo"
    advantage_args: Mapping[str, Any] = field(default_factory=dict)
    policy_loss: str | PolicyLoss | PolicyLossFunction = "ppo"
    policy_loss_args: Mapping[str, Any] = field(default_factory=dict)
    kl: KLEstimator | KL | KLFunction = "none"
    kl_coef: float = 0.0
    kl_in: KLPlace = "loss"
    kl_target: float | None = None
    kl_horizon: int = 10_000
    behaviour: Behaviour = "none"
    behaviour_low: float | None = None
    behaviour_high: float | None = None
    entropy_coef: float = 0.0
    echo: float | None = None
    sequence_mask: float | None = None
    aggregation: Aggregation | TokenWeights | AggregationFunction = "token-mean"
    constant_length: int | None = None
    std_threshold: float | None = None
    max_refill: float = 0.0
    shaping: Shaping = field(default_factory=Shaping)
    expert: Expert | None = None
    distill: Distill | None = None
    source: str

    @property
    def of_advantage(self) -> Advantage:
        """The advantage, ours or somebody else's."""
        return advantage_named(self.advantage)

    @property
    def of_policy_loss(self) -> PolicyLoss:
        """The policy loss, ours or somebody else's."""
        return policy_loss_named(self.policy_loss)

    @property
    def group_relative(self) -> bool:
        """Whether advantages compare the rollouts of a group, so that each group needs two scored ones."""
        return self.of_advantage.group_relative

    @property
    def centred(self) -> bool:
        """Whether the advantages of a group's rollouts sum to 0."""
        return self.of_advantage.centred and not self.advantage_args.get("step_norm", False)

    @property
    def per_call(self) -> bool:
        """Whether each call is treated separately, so that GAE ends with each call."""
        return self.of_advantage.per_call

    @property
    def needs_reward(self) -> bool:
        """Whether advantages depend on rewards; if not, rollouts without a reward train too."""
        return self.of_advantage.needs_reward

    @property
    def named_rewards(self) -> tuple[str, ...]:
        """The rewards by name that advantages compare; none if they depend on the rollout's reward alone."""
        return tuple(self.advantage_args.get("weights") or ()) if self.of_advantage.by_name else ()

    @property
    def needs_teacher(self) -> bool:
        """Whether the algorithm compares the policy with a teacher."""
        return self.distill is not None

    @property
    def teaches_sampled(self) -> bool:
        """Whether a teacher's logprobs of sampled tokens enter the advantages."""
        return self.distill is not None and not self.distill.of_vocabulary

    @property
    def needs_ratio(self) -> bool:
        """Whether tokens must be sampled from the full distribution: a term uses the probability with which they were
        sampled, or the distribution is compared with a teacher's."""
        uses_record = self.needs_reference and (self.kl == "corrected_k3" or self.kl_in == "reward")
        return self.of_policy_loss.needs_ratio or self.needs_teacher or uses_record or self.sequence_mask is not None

    @property
    def off_policy(self) -> bool:
        """Whether tokens of an older policy may be trained: the loss has a probability ratio or is meant for them, or
        the algorithm imitates chosen answers, which may be from any policy."""
        loss = self.of_policy_loss
        return loss.needs_ratio or loss.off_policy or self.advantage in ("best_of_group", "every_rollout")

    @property
    def by_call(self) -> bool:
        """Whether the loss, or what it leaves out, needs the number of each token's call."""
        return self.of_policy_loss.by_call or self.sequence_mask is not None

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm uses logprobs of the reference model."""
        return self.kl != "none" and self.kl_coef > 0

    @property
    def needs_baseline(self) -> bool:
        """Whether each group needs an additional greedy rollout."""
        return self.of_advantage.baseline

    @property
    def by_role(self) -> bool:
        """Whether advantages compare with a baseline of each role, which moves from step to step."""
        return self.of_advantage.by_role

    @property
    def decay(self) -> float:
        """The decay of these baselines; only if `by_role`."""
        return float(self.advantage_args.get("decay", DECAY))

    def role_of(self, task: Task) -> str:
        """Return the role of a task; only if `by_role`. Raises `DatasetError` for a task that has none."""
        return role_of(task, self.advantage_args.get("roles", ()))

    @property
    def needs_critic(self) -> bool:
        """Whether the trainer computes advantages of single tokens with a critic; `advantages` then returns the rewards
        for that."""
        return self.of_advantage.of_tokens is not None

    @property
    def token_baseline(self) -> bool:
        """Whether the trainer compares each token of a group with its position, see `token_baseline`."""
        return self.of_advantage.token_baseline

    @property
    def scores_tokens(self) -> bool:
        """Whether the trainer changes the advantages of single tokens, with a critic's values, KL penalties, a
        teacher's logprobs of sampled tokens, or a baseline of each."""
        penalized = self.needs_reference and self.kl_in == "reward"
        return self.needs_critic or self.teaches_sampled or self.token_baseline or penalized

    @property
    def clips_by_entropy(self) -> bool:
        """Whether the trainer sets advantages to 0 depending on their effect on the entropy."""
        return self.of_advantage.clip is not None

    @property
    def masks_tokens(self) -> bool:
        """Whether the policy loss leaves tokens out of an update, depending on all tokens of the update."""
        return self.of_policy_loss.mask is not None

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy term."""
        return self.entropy_coef > 0

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether tokens with advantage 0 must be computed: they have a gradient from a KL or entropy term, a critic or
        a teacher, what the environment answered has one, or they count in statistics over all tokens."""
        has_gradient = self.needs_reference or self.needs_entropy or self.needs_critic or self.needs_teacher
        by_all = self.clips_by_entropy or self.masks_tokens or self.token_baseline
        return has_gradient or by_all or self.echo is not None

    def most_further(self, batch_size: int) -> int:
        """Return how many additional tasks a step of `batch_size` tasks may roll out to replace left-out groups."""
        return int(self.max_refill * batch_size)

    def advantages(self, scores: Scores) -> FloatArray:
        """Return an advantage for each trained call of a step (C); with a critic, the reward after each call."""
        advantages_C = np.asarray(self.of_advantage.function(scores, **self._reward_args), np.float64)
        if advantages_C.shape != scores.rollouts_C.shape or not np.isfinite(advantages_C).all():
            raise ConfigError(
                f"the advantage {self.advantage!r} must return a finite number for each of {len(scores.rollouts_C)} "
                f"calls, and returned {np.array2string(advantages_C, threshold=8)}"
            )
        return advantages_C

    def spread(self, scores: Scores) -> float:
        """Return the largest standard deviation of the values that the advantage compares within one group, given the
        scores of that group; 0.0 if and only if they are all equal."""
        return self.of_advantage.spread(scores, **self._reward_args)

    @property
    def _reward_args(self) -> Mapping[str, Any]:
        """The arguments of the advantage's `function`: none if they belong to `of_tokens` or `clip`."""
        advantage = self.of_advantage
        return self.advantage_args if advantage.configured is advantage.function else {}

    def keeps_advantage(
        self, advantages_S: FloatArray, logprobs_S: FloatArray, entropy_S: FloatArray, means_S: FloatArray
    ) -> BoolArray:
        """Return which of a step's tokens (S) keep their advantage, see `clip_entropy`; only if `clips_by_entropy`."""
        clip = self.of_advantage.clip
        assert clip is not None, f"{self.advantage} does not clip by entropy"
        return clip(advantages_S, logprobs_S, entropy_S, means_S, **self.advantage_args)

    def keeps_tokens(self, advantages_S: FloatArray, log_ratios_S: FloatArray) -> Kept:
        """Return which of an update's tokens (S) are trained, see `second_moment`; only if `masks_tokens`."""
        mask = self.of_policy_loss.mask
        assert mask is not None, f"{self.policy_loss} leaves no token out"
        return mask(advantages_S, log_ratios_S, **self.policy_loss_args)

    def token_advantages(
        self, rewards_S: FloatArray, values_S: FloatArray, rollouts_S: IndexArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return advantages and returns of a step's tokens (S) from the critic's values; only if `needs_critic`."""
        function = self.of_advantage.of_tokens
        assert function is not None, f"{self.advantage} does not use a critic"
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
    """Return a preset that equals `grpo` except for the given fields."""
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
    _like_grpo("rloo", "RLOO: 'Back to Basics', arXiv 2402.14740.", advantage="rloo"),
    Algorithm(
        name="maxrl",
        advantage="maxrl",
        policy_loss_args={"clip_low": 0.2, "clip_high": 0.2},
        source="MaxRL, arXiv 2602.02710, algorithm 1, for rewards of 0 and 1; clip 0.2, token-mean and no KL are ours.",
    ),
    Algorithm(
        name="gdpo",
        advantage="gdpo",
        policy_loss_args={"clip_low": 0.2, "clip_high": 0.2},
        source="GDPO, arXiv 2601.05242, equations 4 to 6, for several rewards (settings: loss.advantage_args.weights); "
        "clip 0.2, token-mean and no KL are ours.",
    ),
    Algorithm(
        name="otb",
        advantage="otb",
        policy_loss_args={"clip_low": 0.2, "clip_high": 0.2},
        source="OTB, the optimal token baseline, arXiv 2602.07078 (optimal_token_baseline of verl); clip 0.2, "
        "token-mean and no KL are ours.",
    ),
    Algorithm(
        name="icepop",
        policy_loss_args={"clip_low": 0.2, "clip_high": 0.2},
        aggregation="sequence-mean-token-mean",
        behaviour="masked",
        behaviour_low=0.5,
        behaviour_high=5.0,
        source="IcePop: Ring-1T, arXiv 2510.18855: tokens that engine and trainer weigh differently (outside 0.5 / 5) "
        "are not trained; mean over answers of their token means; no KL, as in its reasoning stage; clip 0.2.",
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
        source="ReMax, arXiv 2310.10505, algorithm 1: one greedy rollout more for each task and step; token-mean as in "
        "its authors' code; without its KL penalty (loss.kl k1 with loss.kl_in reward adds it).",
    ),
    Algorithm(
        name="rae",
        advantage="rae",
        policy_loss_args={"clip_low": 0.2, "clip_high": 0.2},
        aggregation="constant-length",
        source="RAE: SPIRAL, arXiv 2506.24119, section 3.3; decay 0.95, clip 0.2 and sums over a constant length as in "
        "its authors' code; no KL.",
    ),
    _like_grpo(
        "reinforceplusplus",
        "REINFORCE++, arXiv 2501.03262: normalized over the whole step; the statistics' unit is the rollout.",
        advantage="reinforceplusplus",
    ),
    _like_grpo(
        "reinforceplusplus_baseline",
        "REINFORCE++ with baseline, arXiv 2501.03262.",
        advantage="grpo_batch_std",
    ),
    _like_grpo(
        "gspo",
        "GSPO, arXiv 2507.18071, equations 5, 7 and 14; clip 3e-4 / 4e-4 (section 5.1).",
        policy_loss="gspo",
        aggregation="sequence-mean-token-mean",
    ),
    _like_grpo(
        "cispo",
        "CISPO: MiniMax-M1, arXiv 2506.13585, equations 4 and 5, token-mean; no lower bound; its upper bound is not "
        "given there: 0.28 of Trinity-RFT.",
        policy_loss="cispo",
    ),
    _like_grpo(
        "sapo",
        "SAPO, arXiv 2511.20347; τ 1 / 1.05; mean over answers of their token means.",
        policy_loss="sapo",
        aggregation="sequence-mean-token-mean",
    ),
    _like_grpo(
        "m2po",
        "M2PO, arXiv 2510.01161: no clip; the tokens furthest from the policy that sampled them are left out of an "
        "update, until the second moment of the log ratios is at most 0.04.",
        policy_loss="m2po",
    ),
    _like_grpo("topr", "TOPR, arXiv 2503.14286, token by token.", advantage="reinforce", policy_loss="topr"),
    _like_grpo("opmd", "OPMD: Kimi k1.5, arXiv 2501.12599, section 2.3.2.", advantage="opmd", policy_loss="opmd"),
    Algorithm(
        name="asymre",
        advantage="asymre",
        policy_loss="opmd",
        source="AsymRE, arXiv 2506.20520; baseline shift -0.1, loss and τ of Trinity-RFT 0.6.0.",
    ),
    Algorithm(
        name="dppo",
        policy_loss="dppo_tv",
        source="DPPO, arXiv 2602.04879, Binary-TV: bound 0.15 of its authors' script in verl (dppo_kl: 0.05); no KL.",
    ),
    Algorithm(
        name="vespo",
        policy_loss="vespo",
        source="VESPO, arXiv 2602.10693: k 2 and λ 3 for A >= 0, k 3 and λ 2 else; token-mean as in its authors' code; "
        "no KL.",
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
    _like_grpo(
        "mix",
        "grpo on rollouts and supervised fine-tuning on an expert's rows in every update: `mix` of Trinity-RFT 0.6.0, "
        "μ 0.1. Needs expert.dataset.",
        expert=Expert(),
    ),
    _like_grpo(
        "mix_chord",
        "CHORD, arXiv 2508.11408: as mix, with weights φ = p (1 - p) of the expert's tokens; μ may warm up and decay "
        "(settings: expert). μ 0.1, constant unless set. Needs expert.dataset.",
        expert=Expert(phi=True),
    ),
    Algorithm(
        name="on_policy_distill",
        advantage="none",
        policy_loss_args={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        distill=Distill(divergence="reverse_sampled"),
        source="'On-Policy Distillation', Thinking Machines Lab, 2025, with the loss of Trinity-RFT 0.6.0 (ppo, clip "
        "0.2, dual clip 3, token-mean, no KL); needs a teacher (settings: distill).",
    ),
    Algorithm(
        name="jsd",
        advantage="none",
        policy_loss="reinforce",
        aggregation="sequence-mean-token-mean",
        distill=Distill(divergence="js"),
        source="GKD, arXiv 2306.13649, equation 1, on the policy's own samples (λ 1), β 0.5, mean over each call's "
        "tokens; needs a teacher (settings: distill). Trinity-RFT 0.6.0 estimates it from sampled tokens instead.",
    ),
    Algorithm(
        name="gigpo",
        advantage="gigpo",
        policy_loss_args={"clip_low": 0.2, "clip_high": 0.2},
        kl="low_var_kl",
        kl_coef=0.01,
        source="GiGPO, arXiv 2505.10978, equations 3 to 8; ω 1; KL 0.01 as in its appendix; γ 1 of Trinity-RFT 0.6.0 "
        "(its authors' scripts have 0.95).",
    ),
)

PRESETS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _ALGORITHMS}


PARTS = ("advantage", "policy_loss", "kl", "aggregation")
"""The fields of an `Algorithm` that name or hold a part."""


def algorithm_named(name: str) -> Algorithm:
    """Return the algorithm of a name in the settings, ours or somebody else's. Raises `ConfigError` for one that nobody
    has, that is none, or that has a part which only ours have."""
    if name in PRESETS:
        return PRESETS[name]
    found = find_part("algorithms", name, PRESETS)
    if not isinstance(found, Algorithm):
        raise ConfigError(f"{name} is a {type(found).__name__}, not an Algorithm (docs/use/extending.md)")
    if found.expert is not None or found.distill is not None:
        raise ConfigError(f"{name} has an expert or a teacher, which only our own algorithms have: leave it out")
    own: dict[str, Any] = {
        part: place_of_field("algorithms", name, part) for part in PARTS if not isinstance(getattr(found, part), str)
    }
    return replace(found, name=name, **own)
