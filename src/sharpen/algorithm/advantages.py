"""Advantages: one number for each trained call, from the rewards of the rollouts of a step.

In: `Scores`, the rewards of all rollouts of a step that take part, with their groups and calls. Out: one advantage per
call. The unit of the statistics is the rollout, however many calls it made, except where a function says otherwise.

Shape suffixes: R rollouts of the step, C trained calls of the step, G rollouts of one group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from sharpen.algorithm.clip_entropy import BoolArray, clip_by_batch, clip_by_vocabulary
from sharpen.algorithm.gae import gae, unbiased_gae
from sharpen.algorithm.returns import (
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
VARIANCE_FLOOR = 1e-8
"""Added to a variance over tokens before its root, as in the spec's engine."""


def grpo(scores: Scores, *, std_normalize: bool = True) -> FloatArray:
    """Group-relative: `(r - mean) / (std + 1e-6)` with the unbiased standard deviation of the group.

    `std_normalize=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). A group whose rewards are all the same
    has advantages of exactly 0.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.
    """
    return scores.per_call(_group_scores(scores, std_normalize))


def step_wise_grpo(scores: Scores, *, std_normalize: bool = True, step_norm: bool = False) -> FloatArray:
    """`grpo` on the rollouts' rewards; each rollout's score goes unchanged to every call of it.

    `step_norm` divides a rollout's score by its number of trained calls.

    Source: `step_wise_grpo` of Trinity-RFT 0.6.0. There a lone run is scored by its raw reward (mean 0, std 1); here a
    group of one is an error, since nothing is relative in it.
    """
    scores_R = _group_scores(scores, std_normalize)
    return scores.per_call(_by_calls(scores, scores_R) if step_norm else scores_R)


def grpo_batch_std(scores: Scores) -> FloatArray:
    """`(r - mean of the group) / (std of these differences over the step + 1e-6)`: easy groups are not blown up.

    Source: REINFORCE++ with baseline, arXiv 2501.03262. `grpo_global_std` has the deviation of the rewards themselves.
    """
    centred_R = _centred(scores)
    return scores.per_call(centred_R / (unbiased_std(centred_R) + EPSILON))


def grpo_global_std(scores: Scores, *, step_norm: bool = False) -> FloatArray:
    """`(r - mean of the group) / (std of all rewards of the step + 1e-6)`; `step_norm` as in `step_wise_grpo`.

    Sources: arXiv 2508.08221, its normalization with the mean of the group and the deviation of the batch;
    `std_cal_level: batch` of Trinity-RFT 0.6.0 (there also over groups that `std_threshold` drops).
    """
    scores_R = _centred(scores) / (std(scores.rewards_R) + EPSILON)
    return scores.per_call(_by_calls(scores, scores_R) if step_norm else scores_R)


def rloo(scores: Scores) -> FloatArray:
    """Leave-one-out: `r_i - mean of the other rewards of the group`.

    Source: "Back to Basics", arXiv 2402.14740 (REINFORCE leave-one-out).
    """
    sizes_R = np.bincount(scores.groups_R)[scores.groups_R]
    return scores.per_call(_centred(scores) * sizes_R / (sizes_R - 1))


def reinforce(scores: Scores) -> FloatArray:
    """The reward itself. Source: R. Williams, "Simple statistical gradient-following algorithms", 1992."""
    return scores.per_call(finite(scores.rewards_R))


def no_advantage(scores: Scores) -> FloatArray:
    """0 for every call, whatever the rewards, also where there are none: what is learnt comes from a teacher."""
    return np.zeros(len(scores.rollouts_C))


def remax(scores: Scores) -> FloatArray:
    """`r - reward of the greedy rollout of the same task`. Source: ReMax, arXiv 2310.10505, algorithm 1."""
    if scores.baselines_R is None:
        raise ValueError("remax compares with a greedy rollout of each task, and there is none")
    return scores.per_call(finite(scores.rewards_R) - finite(scores.baselines_R))


def reinforce_plus_plus(scores: Scores) -> FloatArray:
    """`(r - mean) / (std + 1e-6)` over all rollouts of the step, whatever their task.

    Source: REINFORCE++, arXiv 2501.03262 (without the KL penalty in the reward), each rollout counted once.
    """
    rewards_R = finite(scores.rewards_R)
    centred_R = zero_mean(rewards_R)
    if len(rewards_R) < 2:
        return scores.per_call(centred_R)
    return scores.per_call(centred_R / (unbiased_std(centred_R) + EPSILON))


def reinforce_plus_plus_tokens(scores: Scores) -> FloatArray:
    """`(r - mean) / sqrt(variance + 1e-8)` over all trained tokens of the step, each with the reward of its call (that
    of its rollout, where the workflow wrote none on the call), with the unbiased variance.

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
    """Reward minus a baseline of the group: its mean, or with `tau` the soft maximum `tau log mean exp(r / tau)`.

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
    """`r - (mean of the group + baseline_shift)`: a negative shift stresses what went well over what went badly.

    Source: asymmetric REINFORCE, arXiv 2506.20520 (its δV); -0.1 is the default of Trinity-RFT 0.6.0.
    """
    return scores.per_call(_centred(scores) - baseline_shift)


def rec(scores: Scores, *, std_normalize: bool = False) -> FloatArray:
    """`r - mean of the group`, divided by the population standard deviation + 1e-6 with `std_normalize`.

    Source: "Group-relative REINFORCE is secretly an off-policy algorithm", arXiv 2509.24203.
    """
    centred_R = _centred(scores)
    if std_normalize:
        sizes_R = np.bincount(scores.groups_R)[scores.groups_R]
        population_R = _std_of_group(centred_R, scores.groups_R) * np.sqrt((sizes_R - 1) / sizes_R)
        centred_R = centred_R / (population_R + EPSILON)
    return scores.per_call(centred_R)


def best_of_group(scores: Scores) -> FloatArray:
    """1 for the rollouts of a group with its highest reward, 0 for the others.

    Source: RAFT, arXiv 2304.06767, algorithm 1 (there one best sample; here all that share the highest reward).
    """
    rewards_R = finite(scores.rewards_R)
    best_R = np.zeros_like(rewards_R)
    for places in members(scores.groups_R):
        best_R[places] = rewards_R[places] == rewards_R[places].max()
    return scores.per_call(best_R)


def pass_at_k(scores: Scores, *, k: int = 4) -> FloatArray:
    """Advantages of the reward "at least one of k rollouts is right", exact over all subsets of the group.

    A rollout counts as right if its reward is above 0. With n rollouts of which w are wrong, the mean reward of a
    subset is `m = 1 - C(w, k) / C(n, k)` and its deviation `s = sqrt(m (1 - m))`. Right rollouts get `(1 - m) / s`,
    wrong ones `(1 - m - C(w - 1, k - 1) / C(n - 1, k - 1)) / s`; a group with s = 0 gets 0.

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
        of_wrong = 1.0 - mean - (comb(wrong - 1, k - 1) / comb(num - 1, k - 1) if wrong else 0.0)
        result_R[places] = np.where(right_G, 1.0 - mean, of_wrong) / deviation
    return scores.per_call(result_R)


def gigpo(
    scores: Scores,
    *,
    omega: float = 1.0,
    gamma: float = 1.0,
    std_normalize: bool = False,
    across_tasks: bool = False,
) -> FloatArray:
    """Group-in-group: the episode's return in its group plus `omega` times the call's return among those in its state.

    The return of an episode is the sum of its rewards of steps, or the rollout's reward; that of a call is what comes
    after it, with `gamma` for each further call. Calls of a group made in the same state are compared by their returns;
    a state that occurs once adds 0. `across_tasks` compares states over all groups of the step, where the owner told
    them apart.

    Source: GiGPO, arXiv 2505.10978, equations 3 to 8; `across_tasks` is how `gigpo` of Trinity-RFT 0.6.0 has it.
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
    """Each call's return (the reward after it and those after later calls, discounted), minus the mean return of all
    calls of the group, so that rewards of steps train step by step."""
    returns_C = discounted_returns(scores, gamma)
    groups_C = scores.groups_R[scores.rollouts_C]
    result_C = np.zeros(len(returns_C))
    for places in members(groups_C):
        result_C[places] = zero_mean(returns_C[places])
    return result_C


def reward_spread(scores: Scores, **_: Any) -> float:
    """Standard deviation of the rewards of one group."""
    return std(scores.rewards_R)


def return_spread(scores: Scores, **_: Any) -> float:
    """Standard deviation of the returns of one group's episodes."""
    return std(scores.returns_R)


def state_spread(scores: Scores, *, gamma: float = 1.0, **_: Any) -> float:
    """The largest standard deviation within one group: of the episodes' returns, or of the calls' in one state."""
    returns_C = discounted_returns(scores, gamma)
    return max([std(scores.returns_R), *(std(returns_C[places]) for places in same_state(scores, False))])


def step_spread(scores: Scores, *, gamma: float = 1.0, **_: Any) -> float:
    """Standard deviation of the returns of one group's calls."""
    return std(discounted_returns(scores, gamma))


def call_spread(scores: Scores, **_: Any) -> float:
    """Standard deviation of the rewards of one group's calls, each by itself."""
    return std(rewards_of_calls(scores))


def _by_calls(scores: Scores, scores_R: FloatArray) -> FloatArray:
    """Each rollout's score divided by the number of its trained calls."""
    return scores_R / np.maximum(np.bincount(scores.rollouts_C, minlength=len(scores_R)), 1)


def _centred(scores: Scores, values_R: FloatArray | None = None) -> FloatArray:
    """Rewards (or other values of the rollouts) minus the mean of their group; exactly 0 where all of a group are the
    same."""
    values_R = finite(scores.rewards_R if values_R is None else values_R)
    centred_R = np.zeros_like(values_R)
    for places in members(scores.groups_R):
        if len(places) < 2:
            raise ValueError("a group-relative advantage needs two scored rollouts or more in each group; got one")
        centred_R[places] = zero_mean(values_R[places])
    return centred_R


def _group_scores(scores: Scores, std_normalize: bool, values_R: FloatArray | None = None) -> FloatArray:
    centred_R = _centred(scores, values_R)
    return centred_R / (_std_of_group(centred_R, scores.groups_R) + EPSILON) if std_normalize else centred_R


def _std_of_group(centred_R: FloatArray, groups_R: IndexArray) -> FloatArray:
    """For each rollout the unbiased standard deviation of its group."""
    squares = np.bincount(groups_R, np.square(centred_R))
    return np.sqrt(squares / np.maximum(np.bincount(groups_R) - 1, 1))[groups_R]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """An advantage function by its name. `group_relative`: it compares the rollouts of a group, so that each group
    needs two of them. `centred`: its advantages add up to zero over every group, which each step asserts. `per_step`:
    it uses rewards of steps. `per_call`: it looks at each call by itself, and so at what a workflow wrote on each.
    `spread` is the largest standard deviation of what it compares within one group: 0 where it teaches nothing.
    `of_tokens`: `function` gives rewards of calls, from which this function makes advantages of single tokens with a
    critic's values, of all tokens of a rollout in a row, or with `per_call` of each call's alone. `baseline`: it
    compares with a greedy rollout of each task. `needs_reward`: it looks at rewards at all. `clip`: says which tokens
    keep what `function` gives, by the entropies that the trainer finds."""

    function: Callable[..., FloatArray]
    formula: str
    group_relative: bool = True
    centred: bool = False
    per_step: bool = False
    per_call: bool = False
    spread: Callable[..., float] = reward_spread
    of_tokens: Callable[..., tuple[FloatArray, FloatArray]] | None = None
    baseline: bool = False
    needs_reward: bool = True
    clip: Callable[..., BoolArray] | None = None

    @property
    def configured(self) -> Callable[..., Any]:
        """The function whose keyword parameters can be set."""
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
    "rloo": Advantage(function=rloo, formula="r - mean of the others in g", centred=True),
    "reinforce": Advantage(function=reinforce, formula="r", group_relative=False),
    "none": Advantage(
        function=no_advantage, formula="0, whatever the reward", group_relative=False, needs_reward=False
    ),
    "remax": Advantage(function=remax, formula="r - r of the greedy rollout", group_relative=False, baseline=True),
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
    "best_of_group": Advantage(function=best_of_group, formula="1 if r = max_g else 0"),
    "pass_at_k": Advantage(function=pass_at_k, formula="(R - m) / s of: one of k is right"),
    "gigpo": Advantage(
        function=gigpo,
        formula="R - mean_g of episodes' returns R + omega (return - mean of its state's returns in g)",
        per_step=True,
        spread=state_spread,
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
"""By their names in the configuration."""
