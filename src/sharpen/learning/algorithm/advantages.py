"""Advantages: one number for each trained call, from the rewards of a step's rollouts.

In: `Scores`, the rewards of all rollouts that take part in a step, with their groups and calls. Out: an advantage per
call. Statistics count each rollout once, however many calls it made, unless a function says otherwise.

Shape suffixes: R rollouts of the step, C trained calls of the step, G rollouts of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from sharpen.errors import ConfigError
from sharpen.learning.algorithm.clip_entropy import BoolArray, clip_by_batch, clip_by_vocabulary
from sharpen.learning.algorithm.gae import gae, unbiased_gae
from sharpen.learning.algorithm.parts import AdvantageFunction, named
from sharpen.learning.algorithm.returns import (
    OWN_REWARD,
    FloatArray,
    IndexArray,
    Scores,
    discounted_returns,
    finite,
    members,
    rewards_after_calls,
    rewards_of_calls,
    same_state,
    std,
    unbiased_std,
    zero_mean,
)

EPSILON = 1e-6
"""Added to a standard deviation before dividing, as in the spec's engine."""
SMALLEST_MEAN = 1e-6
"""A group whose mean reward is at most this has nothing that `maxrl` could make likelier."""
DECAY = 0.95
"""Of a role's baseline, for each reward: `role_baseline_ema_gamma` of SPIRAL's authors."""
VARIANCE_FLOOR = 1e-8
"""Added to a variance over tokens before its root, as in the spec's engine."""


def grpo(scores: Scores, *, std_normalize: bool = True) -> FloatArray:
    """Return `(r - mean) / (std + 1e-6)` with mean and unbiased standard deviation of the group.

    `std_normalize=False` omits the division (Dr. GRPO, arXiv 2503.20783). If all rewards of a group are equal, its
    advantages are exactly 0.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
    """
    return scores.per_call(_group_scores(scores, std_normalize))


def step_wise_grpo(scores: Scores, *, std_normalize: bool = True, step_norm: bool = False) -> FloatArray:
    """Return `grpo`; every call of a rollout gets the rollout's value.

    `step_norm` divides the value of a rollout by its number of trained calls.

    Source: `step_wise_grpo` of Trinity-RFT 0.6.0. There, a group of one gets its raw reward (mean 0, std 1); here it is
    an error, since there is nothing to compare with.
    """
    scores_R = _group_scores(scores, std_normalize)
    return scores.per_call(_divide_by_num_calls(scores, scores_R) if step_norm else scores_R)


def grpo_batch_std(scores: Scores) -> FloatArray:
    """Return `(r - mean of the group) / (std of these differences over the step + 1e-6)`, so that groups with little
    spread are not scaled up.

    Source: REINFORCE++ with baseline, arXiv 2501.03262. `grpo_global_std` uses the deviation of the rewards instead.
    """
    centred_R = _centred(scores)
    return scores.per_call(centred_R / (unbiased_std(centred_R) + EPSILON))


def grpo_global_std(scores: Scores, *, step_norm: bool = False) -> FloatArray:
    """Return `(r - mean of the group) / (std of all rewards of the step + 1e-6)`; `step_norm` as in `step_wise_grpo`.

    Sources: arXiv 2508.08221, normalization with group mean and batch deviation; `std_cal_level: batch` of Trinity-RFT
    0.6.0 (which includes groups that `std_threshold` drops).
    """
    scores_R = _centred(scores) / (std(scores.rewards_R) + EPSILON)
    return scores.per_call(_divide_by_num_calls(scores, scores_R) if step_norm else scores_R)


def gdpo(scores: Scores, *, weights: Mapping[str, float] | None = None) -> FloatArray:
    """Return `A / (std of A over the step + 1e-6)`, `A` the weighted sum of `(r - mean) / (std + 1e-6)` of each named
    reward, with its own mean and unbiased deviation in the group. The mean of `A` over the step is 0.

    `weights` are by the names of metrics, and `reward` is the rollout's reward, the only one without `weights`.

    Source: GDPO, arXiv 2601.05242, equations 4 to 6.
    """
    sum_R = np.zeros_like(scores.rewards_R)
    for name, weight in (weights or {OWN_REWARD: 1.0}).items():
        sum_R += weight * _group_scores(scores, True, scores.named(name))
    return scores.per_call(sum_R / (unbiased_std(sum_R) + EPSILON))


def rloo(scores: Scores) -> FloatArray:
    """Return `r_i - mean of the other rewards of the group` (leave-one-out).

    Source: "Back to Basics", arXiv 2402.14740 (REINFORCE leave-one-out).
    """
    sizes_R = np.bincount(scores.groups_R)[scores.groups_R]
    return scores.per_call(_centred(scores) * sizes_R / (sizes_R - 1))


def maxrl(scores: Scores) -> FloatArray:
    """Return `(r - mean) / mean` with the mean of the group; 0 for a group whose mean is at most 1e-6.

    With rewards of 0 and 1, each right rollout weighs more the rarer it is in its group: the expected gradient is that
    of the log of the probability of a right answer, to the order of the group's size. Rewards below 0 have no such
    meaning.

    Source: maximum likelihood reinforcement learning, arXiv 2602.02710, algorithm 1.
    """
    centred_R, means_R = _centred(scores), np.zeros_like(scores.rewards_R)
    for places in members(scores.groups_R):
        means_R[places] = scores.rewards_R[places].mean()
    taught_R = means_R > SMALLEST_MEAN
    return scores.per_call(np.where(taught_R, centred_R / np.where(taught_R, means_R, 1.0), 0.0))


def reinforce(scores: Scores) -> FloatArray:
    """Return the reward itself. Source: R. Williams, "Simple statistical gradient-following algorithms", 1992."""
    return scores.per_call(finite(scores.rewards_R))


def no_advantage(scores: Scores) -> FloatArray:
    """Return 0 for every call, with or without rewards, for algorithms that learn only from a teacher."""
    return np.zeros(len(scores.rollouts_C))


def remax(scores: Scores) -> FloatArray:
    """Return `r - reward of the greedy rollout of the same task`. Source: ReMax, arXiv 2310.10505, algorithm 1."""
    if scores.baselines_R is None:
        raise ValueError("remax needs the reward of a greedy rollout of each task, and there is none")
    return scores.per_call(finite(scores.rewards_R) - finite(scores.baselines_R))


def rae(scores: Scores, *, roles: Sequence[str] = (), decay: float = DECAY) -> FloatArray:
    """Return `r - b`, with the baseline b of the rollout's role as it was before the step (`baselines_R`).

    `roles` are the fields of a task's row that make its role, `decay` is that of the moving average: see
    `role_baseline`. In the authors' code each game moves b before the next one; here all rollouts of a step have the
    same b, so that their order does not matter.

    Source: SPIRAL, arXiv 2506.24119, section 3.3; `decay` and the first baseline 0 of its authors' code.
    """
    if scores.baselines_R is None:
        raise ValueError("rae needs the baseline of each rollout's role, and there is none")
    return scores.per_call(finite(scores.rewards_R) - finite(scores.baselines_R))


def reinforce_plus_plus(scores: Scores) -> FloatArray:
    """Return `(r - mean) / (std + 1e-6)` over all rollouts of the step, across tasks.

    Source: REINFORCE++, arXiv 2501.03262 (without the KL penalty in the reward); each rollout counts once.
    """
    rewards_R = finite(scores.rewards_R)
    centred_R = zero_mean(rewards_R)
    if len(rewards_R) < 2:
        return scores.per_call(centred_R)
    return scores.per_call(centred_R / (unbiased_std(centred_R) + EPSILON))


def reinforce_plus_plus_tokens(scores: Scores) -> FloatArray:
    """Return `(r - mean) / sqrt(variance + 1e-8)` over all trained tokens of the step, with the unbiased variance. Each
    token has the reward of its call, or of its rollout if the workflow set none on the call.

    Source: `reinforceplusplus` of Trinity-RFT 0.6.0 with γ 1.
    """
    rewards_C = rewards_of_calls(scores)
    num_tokens = int(scores.num_tokens_C.sum())
    if num_tokens < 2:
        return np.zeros(len(rewards_C))
    shifted_C = rewards_C - rewards_C[:1]  # makes equal rewards exactly zero
    centred_C = shifted_C - (scores.num_tokens_C * shifted_C).sum() / num_tokens
    variance = float((scores.num_tokens_C * np.square(centred_C)).sum() / (num_tokens - 1))
    result_C: FloatArray = centred_C / np.sqrt(variance + VARIANCE_FLOOR)
    return result_C


def opmd(scores: Scores, *, tau: float | None = None) -> FloatArray:
    """Return the reward minus a baseline: the group mean or, with `tau`, the soft maximum `tau log mean exp(r / tau)`.

    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.2; `opmd` of Trinity-RFT 0.6.0 (`mean`, `logavgexp`).
    """
    centred_R = _centred(scores)
    if tau is None:
        return scores.per_call(centred_R)
    soft_R = np.zeros_like(centred_R)
    for places in members(scores.groups_R):
        scaled_G = centred_R[places] / tau
        top = scaled_G.max()
        soft_R[places] = tau * (top + np.log(np.exp(scaled_G - top).mean()))
    return scores.per_call(centred_R - soft_R)


def asymre(scores: Scores, *, baseline_shift: float = -0.1) -> FloatArray:
    """Return `r - (mean of the group + baseline_shift)`: a negative shift emphasizes good rollouts over bad ones.

    Source: asymmetric REINFORCE, arXiv 2506.20520 (its δV); -0.1 is the default of Trinity-RFT 0.6.0.
    """
    return scores.per_call(_centred(scores) - baseline_shift)


def rec(scores: Scores, *, std_normalize: bool = False) -> FloatArray:
    """Return `r - mean of the group`; `std_normalize` divides by the population standard deviation + 1e-6.

    Source: "Group-relative REINFORCE is secretly an off-policy algorithm", arXiv 2509.24203.
    """
    centred_R = _centred(scores)
    if std_normalize:
        sizes_R = np.bincount(scores.groups_R)[scores.groups_R]
        population_R = _std_of_group(centred_R, scores.groups_R) * np.sqrt((sizes_R - 1) / sizes_R)
        centred_R = centred_R / (population_R + EPSILON)
    return scores.per_call(centred_R)


def otb(scores: Scores) -> FloatArray:
    """Return `r - mean of the group`, from which the trainer subtracts a baseline of each token (`token_baseline`): the
    same as from r, for that baseline is a weighted mean of the group.

    Source: optimal token baseline, arXiv 2602.07078.
    """
    return scores.per_call(_centred(scores))


def best_of_group(scores: Scores) -> FloatArray:
    """Return 1 for the rollouts with the highest reward of their group, 0 for the others.

    Source: RAFT, arXiv 2304.06767, algorithm 1 (there a single best sample; here all with the highest reward).
    """
    rewards_R = finite(scores.rewards_R)
    best_R = np.zeros_like(rewards_R)
    for places in members(scores.groups_R):
        best_R[places] = rewards_R[places] == rewards_R[places].max()
    return scores.per_call(best_R)


def every_rollout(scores: Scores) -> FloatArray:
    """Return 1 for every rollout, so that all are imitated alike. Source: `raft` of Trinity-RFT 0.6.0, where the
    workflow decides what it returns."""
    return scores.per_call(np.ones_like(scores.rewards_R))


def pass_at_k(scores: Scores, *, k: int = 4) -> FloatArray:
    """Return advantages for the reward "at least one of k rollouts is right", exact over all subsets of the group.

    A rollout is right if its reward is above 0. With n rollouts, w of them wrong, the mean reward of a subset is
    `m = 1 - C(w, k) / C(n, k)`, with standard deviation `s = sqrt(m (1 - m))`. Right rollouts get `(1 - m) / s`, wrong
    ones `(1 - m - C(w - 1, k - 1) / C(n - 1, k - 1)) / s`; if s = 0, all get 0.

    Source: "Pass@k training", arXiv 2508.10751, its analytical derivation. Raises `ValueError` for a group smaller
    than k.
    """
    rewards_R = finite(scores.rewards_R)
    result_R = np.zeros_like(rewards_R)
    for places in members(scores.groups_R):
        right_G = rewards_R[places] > 0
        num, wrong = len(places), int((~right_G).sum())
        if num < k:
            raise ValueError(f"pass@{k} needs groups of at least {k} scored rollouts; got one of {num}")
        mean = 1.0 - comb(wrong, k) / comb(num, k)
        deviation = float(np.sqrt(mean * (1.0 - mean)))
        if deviation == 0.0:
            continue
        wrong_advantage = 1.0 - mean - (comb(wrong - 1, k - 1) / comb(num - 1, k - 1) if wrong else 0.0)
        result_R[places] = np.where(right_G, 1.0 - mean, wrong_advantage) / deviation
    return scores.per_call(result_R)


def gigpo(
    scores: Scores,
    *,
    omega: float = 1.0,
    gamma: float = 1.0,
    std_normalize: bool = False,
    across_tasks: bool = False,
) -> FloatArray:
    """Return the episode's return relative to its group plus `omega` times the call's return relative to its state.

    The return of an episode is the sum of its step rewards, or else the rollout's reward; that of a call is the sum of
    the rewards after it, discounted by `gamma` per call. Calls of a group in the same state are compared with each
    other; a state that occurs once contributes 0. `across_tasks` compares states over all groups of the step, if the
    workflow named them.

    Source: GiGPO, arXiv 2505.10978, equations 3 to 8; `across_tasks` as in `gigpo` of Trinity-RFT 0.6.0.
    """
    episodes_R = _group_scores(scores, std_normalize, scores.returns_R)
    returns_C = discounted_returns(scores, gamma)
    steps_C = np.zeros(len(returns_C))
    for places in same_state(scores, across_tasks):
        if len(places) < 2:
            continue
        centred_G = zero_mean(returns_C[places])
        steps_C[places] = centred_G / (unbiased_std(centred_G) + EPSILON) if std_normalize else centred_G
    return scores.per_call(episodes_R) + omega * steps_C


def step_rewards(scores: Scores, *, gamma: float = 1.0) -> FloatArray:
    """Return each call's discounted return minus the mean return of all calls of the group."""
    returns_C = discounted_returns(scores, gamma)
    groups_C = scores.groups_R[scores.rollouts_C]
    result_C = np.zeros(len(returns_C))
    for places in members(groups_C):
        result_C[places] = zero_mean(returns_C[places])
    return result_C


def reward_spread(scores: Scores, **_: Any) -> float:
    """Return the standard deviation of one group's rewards."""
    return std(scores.rewards_R)


def return_spread(scores: Scores, **_: Any) -> float:
    """Return the standard deviation of one group's episode returns."""
    return std(scores.returns_R)


def metric_spread(scores: Scores, *, weights: Mapping[str, float] | None = None, **_: Any) -> float:
    """Return the largest standard deviation of one group's named rewards."""
    return max(std(scores.named(name)) for name in weights or (OWN_REWARD,))


def state_spread(scores: Scores, *, gamma: float = 1.0, **_: Any) -> float:
    """Return the largest standard deviation within one group: of its episode returns, or of call returns in a state."""
    returns_C = discounted_returns(scores, gamma)
    return max([std(scores.returns_R), *(std(returns_C[places]) for places in same_state(scores, False))])


def step_spread(scores: Scores, *, gamma: float = 1.0, **_: Any) -> float:
    """Return the standard deviation of one group's call returns."""
    return std(discounted_returns(scores, gamma))


def call_spread(scores: Scores, **_: Any) -> float:
    """Return the standard deviation of one group's call rewards."""
    return std(rewards_of_calls(scores))


def _divide_by_num_calls(scores: Scores, scores_R: FloatArray) -> FloatArray:
    """Divide each rollout's score by its number of trained calls."""
    return scores_R / np.maximum(np.bincount(scores.rollouts_C, minlength=len(scores_R)), 1)


def _centred(scores: Scores, values_R: FloatArray | None = None) -> FloatArray:
    """Subtract the group mean from rewards (or other values of the rollouts); exactly 0 if all of a group are equal."""
    values_R = finite(scores.rewards_R if values_R is None else values_R)
    centred_R = np.zeros_like(values_R)
    for places in members(scores.groups_R):
        if len(places) < 2:
            raise ValueError("a group-relative advantage needs at least two scored rollouts in each group; got one")
        centred_R[places] = zero_mean(values_R[places])
    return centred_R


def _group_scores(scores: Scores, std_normalize: bool, values_R: FloatArray | None = None) -> FloatArray:
    centred_R = _centred(scores, values_R)
    return centred_R / (_std_of_group(centred_R, scores.groups_R) + EPSILON) if std_normalize else centred_R


def _std_of_group(centred_R: FloatArray, groups_R: IndexArray) -> FloatArray:
    """Return for each rollout the unbiased standard deviation of its group."""
    squares = np.bincount(groups_R, np.square(centred_R))
    return np.sqrt(squares / np.maximum(np.bincount(groups_R) - 1, 1))[groups_R]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """An advantage function and its properties.

    `group_relative`: it compares the rollouts of a group, so each group needs two of them. `centred`: its advantages
    sum to 0 over every group, which each step asserts. `per_step`: it uses step rewards. `per_call`: it treats each
    call separately, and uses the rewards that a workflow sets on calls. `baseline`: it compares with a greedy rollout
    of each task. `by_role`: it compares with a baseline that moves from step to step, of each role. `needs_reward`: it
    depends on rewards. `by_states`: it compares calls made in the same state, which their messages show if the workflow
    does not name it. `by_name`: it compares the metrics that its argument `weights` names.

    `spread` returns the largest standard deviation of the values compared within one group; 0 means that the group
    teaches nothing. With `of_tokens`, `function` returns rewards of calls, and `of_tokens` computes from them and the
    critic's values the advantages of single tokens, over a whole rollout or (`per_call`) call by call. `clip` decides
    from entropies which tokens keep the advantage that `function` returns. With `token_baseline`, the trainer compares
    each token with its position in the group.

    `second` is the formula once more, for the certificate; ours are in `evidence.certificate.formulas`. It shares no
    code with `function`, takes the same parameters, and gets the groups that train, each a sequence of members. A
    member has `reward`, `episode` (the sum of its step rewards, or else its reward), `baseline`, `metrics`, and
    `calls`, each with `num_tokens`, `reward_after`, `own_reward` and `state`. It returns for each group a list with a
    number for each member, or with a list of numbers, one for each call.
    """

    function: AdvantageFunction
    formula: str
    group_relative: bool = True
    centred: bool = False
    per_step: bool = False
    per_call: bool = False
    spread: Callable[..., float] = reward_spread
    of_tokens: Callable[..., tuple[FloatArray, FloatArray]] | None = None
    baseline: bool = False
    needs_reward: bool = True
    by_states: bool = False
    by_name: bool = False
    by_role: bool = False
    clip: Callable[..., BoolArray] | None = None
    token_baseline: bool = False
    second: Callable[..., Sequence[Sequence[float | Sequence[float]]]] | None = None

    @property
    def configured(self) -> Callable[..., Any]:
        """The function whose keyword parameters the configuration sets."""
        return self.of_tokens or self.clip or self.function


ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(function=grpo, formula="(r - mean_g) / (std_g + 1e-6)", centred=True),
    "step_wise_grpo": Advantage(
        function=step_wise_grpo, formula="grpo; / number of calls with step_norm", centred=True
    ),
    "clipb": Advantage(
        function=grpo,
        clip=clip_by_batch,
        formula="grpo; 0 if < 0 where S = p (H + log p) < mean - mu std of S over the step",
        centred=True,
    ),
    "clipv": Advantage(
        function=grpo,
        clip=clip_by_vocabulary,
        formula="grpo; 0 if < 0 where S = p (H + log p) < E_p S - mu std; at most max_frac of the step's tokens",
        centred=True,
    ),
    "grpo_batch_std": Advantage(
        function=grpo_batch_std, formula="(r - mean_g) / (std_batch(r - mean_g) + 1e-6)", centred=True
    ),
    "grpo_global_std": Advantage(
        function=grpo_global_std, formula="(r - mean_g) / (std_batch(r) + 1e-6)", centred=True
    ),
    "gdpo": Advantage(
        function=gdpo,
        formula="A / (std_batch(A) + 1e-6), A = sum of weight (r - mean_g) / (std_g + 1e-6) over named rewards r",
        centred=True,
        by_name=True,
        spread=metric_spread,
    ),
    "rloo": Advantage(function=rloo, formula="r - mean of the others in g", centred=True),
    "maxrl": Advantage(function=maxrl, formula="(r - mean_g) / mean_g; 0 where mean_g <= 1e-6", centred=True),
    "reinforce": Advantage(function=reinforce, formula="r", group_relative=False),
    "none": Advantage(
        function=no_advantage, formula="0, whatever the reward", group_relative=False, needs_reward=False
    ),
    "remax": Advantage(function=remax, formula="r - r of the greedy rollout", group_relative=False, baseline=True),
    "rae": Advantage(
        function=rae,
        formula="r - b of its role, a moving average of the rewards of all steps before",
        group_relative=False,
        by_role=True,
    ),
    "reinforceplusplus": Advantage(
        function=reinforce_plus_plus, formula="(r - mean_batch) / (std_batch + 1e-6)", group_relative=False
    ),
    "reinforceplusplus_tokens": Advantage(
        function=reinforce_plus_plus_tokens,
        formula="(r - mean) / sqrt(var + 1e-8) over the step's tokens",
        group_relative=False,
        per_call=True,
        spread=call_spread,
    ),
    "opmd": Advantage(function=opmd, formula="r - mean_g, or r - tau log mean_g exp(r / tau)"),
    "asymre": Advantage(function=asymre, formula="r - mean_g - baseline_shift"),
    "rec": Advantage(function=rec, formula="r - mean_g", centred=True),
    "otb": Advantage(
        function=otb,
        formula="r - b_t of token t, b_t = Σ_g r W_t / Σ_g W_t, W_t = Σ of 1 - 2 p + Σ_v p_v² up to t",
        centred=True,
        token_baseline=True,
    ),
    "best_of_group": Advantage(function=best_of_group, formula="1 if r = max_g else 0"),
    "every_rollout": Advantage(
        function=every_rollout, formula="1, whatever the reward", group_relative=False, needs_reward=False
    ),
    "pass_at_k": Advantage(function=pass_at_k, formula="(R - m) / s of: one of k is right"),
    "gigpo": Advantage(
        function=gigpo,
        formula="R - mean_g of episodes' returns R + omega (return - mean of its state's returns in g)",
        per_step=True,
        spread=state_spread,
        by_states=True,
    ),
    "step_rewards": Advantage(
        function=step_rewards, formula="return - mean of the group's returns", per_step=True, spread=step_spread
    ),
    "gae": Advantage(
        function=rewards_after_calls,
        formula="Σ_k (γ λ)^k δ_(t+k) of tokens t, δ_t = r_t + γ V_(t+1) - V_t, whitened over the step",
        group_relative=False,
        per_step=True,
        spread=return_spread,
        of_tokens=gae,
    ),
    "call_gae": Advantage(
        function=rewards_of_calls,
        formula="gae of each call by itself, with its reward at its end; unbiased variance",
        group_relative=False,
        per_call=True,
        spread=call_spread,
        of_tokens=unbiased_gae,
    ),
}
"""Advantages by their names in the configuration."""


def advantage_named(name: str | Advantage | AdvantageFunction) -> Advantage:
    """Return the advantage of a name in the settings. Raises `ConfigError` for one of somebody else's that is none, or
    has a part that the certificate could not compute again."""
    advantage = named("advantages", name, ADVANTAGES, Advantage)
    if not (isinstance(name, str) and name in ADVANTAGES):
        if (
            advantage.of_tokens is not None
            or advantage.clip is not None
            or advantage.by_role
            or advantage.token_baseline
        ):
            raise ConfigError(
                f"{name} has of_tokens, clip, by_role or token_baseline, which only our own advantages have: leave "
                "them out"
            )
        if advantage.spread not in SPREADS:
            known = ", ".join(sorted(spread.__name__ for spread in SPREADS))
            raise ConfigError(f"{name} has a spread of its own: the certificate computes only {known}")
    return advantage


SPREADS = (reward_spread, metric_spread, return_spread, state_spread, step_spread, call_spread)
"""What `Advantage.spread` may be."""
