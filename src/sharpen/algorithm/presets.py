"""The published algorithms by name, each a value made of parts.

In: nothing. Out: `PRESETS`, of `Algorithm`s; `resolve` applies a run's settings to one. To add one: a pure function
for whatever part is new (`advantages`, `losses`), a line in `PRESETS`, a test with hand-computed numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sharpen.algorithm.advantages import ADVANTAGES
from sharpen.algorithm.clip_entropy import BoolArray
from sharpen.algorithm.distill import Distill
from sharpen.algorithm.expert import Expert
from sharpen.algorithm.losses import POLICY_LOSSES
from sharpen.algorithm.returns import FloatArray, IndexArray, Scores
from sharpen.algorithm.shaping import Shaping
from sharpen.config.run import (
    Aggregation,
    Behaviour,
    KLEstimator,
    KLPlace,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What is optimized: an advantage and a policy loss by name with their parameters (absent ones have the
    function's defaults), and further terms, which mean what they mean in `LossConfig`. Groups of a step that
    are left out are replaced by those of up to `max_refill` times as many further tasks as a step has; `shaping` is
    what happens to rewards before; `expert` how rows of an expert take part, `distill` how a
    teacher does, if they do.

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
    expert: Expert | None = None
    distill: Distill | None = None
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
    def per_call(self) -> bool:
        """Whether each call is looked at by itself, so that GAE ends with each call."""
        return ADVANTAGES[self.advantage].per_call

    @property
    def needs_reward(self) -> bool:
        """Whether the rewards of rollouts enter the advantages; else rollouts without one train as well."""
        return ADVANTAGES[self.advantage].needs_reward

    @property
    def needs_teacher(self) -> bool:
        """Whether the policy is compared with a teacher."""
        return self.distill is not None

    @property
    def teaches_sampled(self) -> bool:
        """Whether advantages come from a teacher's logprobs of sampled tokens."""
        return self.distill is not None and not self.distill.of_vocabulary

    @property
    def needs_ratio(self) -> bool:
        """Whether tokens must come from the whole distribution: the loss divides by the probability that they were
        sampled with, or a teacher is compared with it."""
        return POLICY_LOSSES[self.policy_loss].needs_ratio or self.needs_teacher

    @property
    def off_policy(self) -> bool:
        """Whether tokens of an older policy may train again: the loss weighs them by a probability ratio, or is made
        for them, or imitates the best of the answers given, whoever gave them."""
        loss = POLICY_LOSSES[self.policy_loss]
        return loss.needs_ratio or loss.off_policy or self.advantage == "best_of_group"

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
        """Whether the trainer adds to the advantages what it alone knows: a critic's values, KL penalties, a teacher's
        logprobs of sampled tokens."""
        return self.needs_critic or self.teaches_sampled or (self.needs_reference and self.kl_in == "reward")

    @property
    def clips_by_entropy(self) -> bool:
        """Whether the trainer takes advantages from single tokens by what they do to the entropy."""
        return ADVANTAGES[self.advantage].clip is not None

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy enters the loss."""
        return self.entropy_coef > 0

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a token with advantage 0 has a gradient at all (of KL or entropy term, by critic or teacher), or
        counts in what is found out about others."""
        has_gradient = self.needs_reference or self.needs_entropy or self.needs_critic or self.needs_teacher
        return has_gradient or self.clips_by_entropy

    def most_further(self, batch_size: int) -> int:
        """How many further tasks a step of `batch_size` tasks may roll out in place of groups that are left out."""
        return int(self.max_refill * batch_size)

    def advantages(self, scores: Scores) -> FloatArray:
        """One advantage for each trained call of a step (C); with a critic the reward that comes after it."""
        return ADVANTAGES[self.advantage].function(scores, **self._of_rewards)

    def spread(self, scores: Scores) -> float:
        """The largest standard deviation of what is compared within one group, whose scores these are; 0.0 if and only
        if nothing differs."""
        return ADVANTAGES[self.advantage].spread(scores, **self._of_rewards)

    @property
    def _of_rewards(self) -> Mapping[str, Any]:
        """The parameters of the function of rewards; those of tokens belong to another."""
        advantage = ADVANTAGES[self.advantage]
        return self.advantage_args if advantage.configured is advantage.function else {}

    def keeps_advantage(
        self, advantages_S: FloatArray, logprobs_S: FloatArray, entropy_S: FloatArray, means_S: FloatArray
    ) -> BoolArray:
        """Which of a step's tokens (S) keep their advantage (`clip_entropy` says by what); only if
        `clips_by_entropy`."""
        clip = ADVANTAGES[self.advantage].clip
        assert clip is not None, f"{self.advantage} leaves no token out"
        return clip(advantages_S, logprobs_S, entropy_S, means_S, **self.advantage_args)

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
    _like_grpo("rloo", "RLOO: 'Back to Basics', arXiv 2402.14740.", advantage="rloo"),
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
    _like_grpo("topr", "TOPR, arXiv 2503.14286, token by token.", advantage="reinforce", policy_loss="topr"),
    _like_grpo("opmd", "OPMD: Kimi k1.5, arXiv 2501.12599, section 2.3.2.", advantage="opmd", policy_loss="opmd"),
    Algorithm(
        name="asymre",
        advantage="asymre",
        policy_loss="opmd",
        source="AsymRE, arXiv 2506.20520; baseline shift -0.1, loss and τ of Trinity-RFT 0.6.0.",
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
