"""Advantages: one number for each trained call, from the rewards of the rollouts of a step.

In: `Scores`, the rewards of all scored rollouts of a step with their groups and calls. Out: one advantage per call.
The unit of the statistics is the rollout, however many calls it made, except where a function says otherwise. None of
these functions looks at tokens.

Shape suffixes: R rollouts of the step, C trained calls of the step, G rollouts of one group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from agenttune.algorithm.clip_entropy import BoolArray, clip_by_batch, clip_by_vocabulary
from agenttune.algorithm.gae import gae

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

EPSILON = 1e-6
"""Added to a standard deviation before dividing, as in the spec's engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What advantages are computed from.

    `groups_R` numbers the rollouts' groups, `rollouts_C` the calls' rollouts (calls of a rollout in order).
    `call_rewards_C` is the reward that the workflow gave a call by itself, NaN where it gave none. Calls of a group
    with the same `states_C` were made in the same state of the environment. `baselines_R` is the reward of the greedy
    rollout of each rollout's task, None where there was none.
    """

    rewards_R: FloatArray
    groups_R: IndexArray
    rollouts_C: IndexArray
    call_rewards_C: FloatArray
    states_C: IndexArray
    baselines_R: FloatArray | None = None

    @classmethod
    def of_rollouts(cls, rewards: Any, groups: Any = None, num_calls: Any = None) -> Scores:
        """Scores of rollouts with nothing known of their calls but how many they made (default: one each)."""
        rewards_R = np.asarray(rewards, np.float64)
        counts_R = np.ones(len(rewards_R), np.int64) if num_calls is None else np.asarray(num_calls, np.int64)
        num = int(counts_R.sum())
        return cls(
            rewards_R=rewards_R,
            groups_R=np.zeros(len(rewards_R), np.int64) if groups is None else np.asarray(groups, np.int64),
            rollouts_C=np.repeat(np.arange(len(rewards_R)), counts_R),
            call_rewards_C=np.full(num, np.nan),
            states_C=np.arange(num),
        )

    def per_call(self, values_R: FloatArray) -> FloatArray:
        """Each rollout's value for each of its calls."""
        return values_R[self.rollouts_C]


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
    if step_norm:
        scores_R = scores_R / np.maximum(np.bincount(scores.rollouts_C, minlength=len(scores_R)), 1)
    return scores.per_call(scores_R)


def grpo_batch_std(scores: Scores) -> FloatArray:
    """`(r - mean of the group) / (std over all rollouts of the step + 1e-6)`, so that easy groups are not blown up.

    Source: REINFORCE++ with baseline, arXiv 2501.03262; also "global std" in arXiv 2508.08221.
    """
    centred_R = _centred(scores)
    return scores.per_call(centred_R / (_unbiased_std(centred_R) + EPSILON))


def rloo(scores: Scores) -> FloatArray:
    """Leave-one-out: `r_i - mean of the other rewards of the group`.

    Source: "Back to Basics", arXiv 2402.14740 (REINFORCE leave-one-out).
    """
    sizes_R = np.bincount(scores.groups_R)[scores.groups_R]
    return scores.per_call(_centred(scores) * sizes_R / (sizes_R - 1))


def reinforce(scores: Scores) -> FloatArray:
    """The reward itself. Source: R. Williams, "Simple statistical gradient-following algorithms", 1992."""
    return scores.per_call(_finite(scores.rewards_R))


def no_advantage(scores: Scores) -> FloatArray:
    """0 for every call, whatever the rewards, also where there are none: what is learnt comes from a teacher."""
    return np.zeros(len(scores.rollouts_C))


def remax(scores: Scores) -> FloatArray:
    """`r - reward of the greedy rollout of the same task`. Source: ReMax, arXiv 2310.10505, algorithm 1."""
    if scores.baselines_R is None:
        raise ValueError("remax compares with a greedy rollout of each task, and there is none")
    return scores.per_call(_finite(scores.rewards_R) - _finite(scores.baselines_R))


def reinforce_plus_plus(scores: Scores) -> FloatArray:
    """`(r - mean) / (std + 1e-6)` over all rollouts of the step, whatever their task.

    Source: REINFORCE++, arXiv 2501.03262 (without the KL penalty in the reward).
    """
    rewards_R = _finite(scores.rewards_R)
    centred_R = _zero_mean(rewards_R)
    if len(rewards_R) < 2:
        return scores.per_call(centred_R)
    return scores.per_call(centred_R / (_unbiased_std(centred_R) + EPSILON))


def opmd(scores: Scores, *, tau: float | None = None) -> FloatArray:
    """Reward minus a baseline of the group: its mean, or with `tau` the soft maximum `tau log mean exp(r / tau)`.

    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.2; `opmd` of Trinity-RFT 0.6.0 (`mean`, `logavgexp`).
    """
    centred_R = _centred(scores)
    if tau is None:
        return scores.per_call(centred_R)
    soft_R = np.zeros_like(centred_R)
    for members in _members(scores.groups_R):
        scaled_G = centred_R[members] / tau
        top = scaled_G.max()
        soft_R[members] = tau * (top + np.log(np.exp(scaled_G - top).mean()))
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
    rewards_R = _finite(scores.rewards_R)
    best_R = np.zeros_like(rewards_R)
    for members in _members(scores.groups_R):
        best_R[members] = rewards_R[members] == rewards_R[members].max()
    return scores.per_call(best_R)


def pass_at_k(scores: Scores, *, k: int = 4) -> FloatArray:
    """Advantages of the reward "at least one of k rollouts is right", exact over all subsets of the group.

    A rollout counts as right if its reward is above 0. With n rollouts of which w are wrong, the mean reward of a
    subset is `m = 1 - C(w, k) / C(n, k)` and its deviation `s = sqrt(m (1 - m))`. Right rollouts get `(1 - m) / s`,
    wrong ones `(1 - m - C(w - 1, k - 1) / C(n - 1, k - 1)) / s`; a group with s = 0 gets 0.

    Source: "Pass@k training", arXiv 2508.10751, its analytical derivation. Raises `ValueError` for a group smaller
    than k.
    """
    rewards_R = _finite(scores.rewards_R)
    result_R = np.zeros_like(rewards_R)
    for members in _members(scores.groups_R):
        right_G = rewards_R[members] > 0
        num, wrong = len(members), int((~right_G).sum())
        if num < k:
            raise ValueError(f"pass@{k} needs groups of at least {k} scored rollouts; got one of {num}")
        mean = 1.0 - comb(wrong, k) / comb(num, k)
        deviation = float(np.sqrt(mean * (1.0 - mean)))
        if deviation == 0.0:
            continue
        of_wrong = 1.0 - mean - (comb(wrong - 1, k - 1) / comb(num - 1, k - 1) if wrong else 0.0)
        result_R[members] = np.where(right_G, 1.0 - mean, of_wrong) / deviation
    return scores.per_call(result_R)


def gigpo(scores: Scores, *, omega: float = 1.0, gamma: float = 1.0, std_normalize: bool = False) -> FloatArray:
    """Group-in-group: the rollout's advantage in its group plus `omega` times the call's among those in its state.

    A call's return is its own reward (where the workflow gave none: 0 but for the last call, which gets the rollout's)
    plus `gamma` times that of the next call. Calls of a group made in the same state are compared by their returns; a
    state that occurs once adds 0.

    Source: GiGPO, arXiv 2505.10978, equations 3 to 8.
    """
    episodes_R = _group_scores(scores, std_normalize)
    returns_C = discounted_returns(scores, gamma)
    groups_C = scores.groups_R[scores.rollouts_C]
    steps_C = np.zeros(len(returns_C))
    _, states_C = np.unique(np.stack([groups_C, scores.states_C]), axis=1, return_inverse=True)
    for members in _members(states_C.ravel()):
        if len(members) < 2:
            continue
        centred_G = _zero_mean(returns_C[members])
        steps_C[members] = centred_G / (_unbiased_std(centred_G) + EPSILON) if std_normalize else centred_G
    return scores.per_call(episodes_R) + omega * steps_C


def step_rewards(scores: Scores, *, gamma: float = 1.0) -> FloatArray:
    """Each call's return (its own reward and those of later calls, discounted), minus the mean return of all calls of
    the group, so that rewards given call by call train call by call."""
    returns_C = discounted_returns(scores, gamma)
    groups_C = scores.groups_R[scores.rollouts_C]
    result_C = np.zeros(len(returns_C))
    for members in _members(groups_C):
        result_C[members] = _zero_mean(returns_C[members])
    return result_C


def discounted_returns(scores: Scores, gamma: float) -> FloatArray:
    """Return of each call: its reward plus `gamma` times the return of the rollout's next call, shape C.

    Without rewards of its calls a rollout's reward is that of its last call.
    """
    rewards_C = call_rewards(scores)
    returns_C = np.zeros(len(rewards_C))
    for members in _members(scores.rollouts_C):
        following = 0.0
        for place in members[::-1].tolist():
            following = rewards_C[place] + gamma * following
            returns_C[place] = following
    return returns_C


def call_rewards(scores: Scores) -> FloatArray:
    """The reward that comes after each call, shape C: its own (0 where the workflow gave it none).

    Without rewards of its calls a rollout's reward is that of its last call.
    """
    _finite(scores.rewards_R)
    rewards_C = np.nan_to_num(scores.call_rewards_C, nan=0.0)
    for rollout, members in zip(np.unique(scores.rollouts_C), _members(scores.rollouts_C), strict=True):
        if np.isnan(scores.call_rewards_C[members]).all():
            rewards_C[members[-1]] = scores.rewards_R[rollout]
    return rewards_C


def reward_std(rewards_G: FloatArray) -> float:
    """Unbiased standard deviation of a group's rewards; exactly 0.0 if and only if all are the same."""
    return _unbiased_std(_zero_mean(_finite(np.asarray(rewards_G, np.float64))))


def _members(numbers: IndexArray) -> list[IndexArray]:
    """The places of each number, in ascending order of the numbers."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []


def _finite(rewards_R: FloatArray) -> FloatArray:
    if rewards_R.ndim != 1 or not np.isfinite(rewards_R).all():
        raise ValueError(f"rewards must be finite numbers, one per rollout; got {rewards_R.tolist()}")
    return rewards_R


def _centred(scores: Scores) -> FloatArray:
    """Rewards minus the mean of their group; exactly 0 where all rewards of a group are the same."""
    rewards_R = _finite(scores.rewards_R)
    centred_R = np.zeros_like(rewards_R)
    for members in _members(scores.groups_R):
        if len(members) < 2:
            raise ValueError("a group-relative advantage needs two scored rollouts or more in each group; got one")
        centred_R[members] = _zero_mean(rewards_R[members])
    return centred_R


def _group_scores(scores: Scores, std_normalize: bool) -> FloatArray:
    centred_R = _centred(scores)
    return centred_R / (_std_of_group(centred_R, scores.groups_R) + EPSILON) if std_normalize else centred_R


def _zero_mean(values_G: FloatArray) -> FloatArray:
    # Subtracting one member first makes equal values exactly zero, where subtracting a rounded mean would not.
    shifted_G = values_G - values_G[:1]
    centred_G: FloatArray = shifted_G - shifted_G.mean() if len(values_G) else shifted_G
    return centred_G


def _std_of_group(centred_R: FloatArray, groups_R: IndexArray) -> FloatArray:
    """For each rollout the unbiased standard deviation of its group."""
    squares = np.bincount(groups_R, np.square(centred_R))
    return np.sqrt(squares / np.maximum(np.bincount(groups_R) - 1, 1))[groups_R]


def _unbiased_std(centred_G: FloatArray) -> float:
    return float(np.sqrt(np.square(centred_G).sum() / max(len(centred_G) - 1, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """An advantage function by its name. `group_relative`: it compares the rollouts of a group, so that each group
    needs two scored ones. `centred`: its advantages add up to zero over every group, which each step asserts.
    `per_call`: it uses the rewards that a workflow gave its calls one by one. `of_tokens`: `function` gives the
    rewards after each call, from which this function makes advantages of single tokens with a critic's values.
    `baseline`: it compares with a greedy rollout of each task. `needs_reward`: it looks at rewards at all.
    `clip`: says which tokens keep what `function` gives, by the entropies that the trainer finds."""

    function: Callable[..., FloatArray]
    formula: str
    group_relative: bool = True
    centred: bool = False
    per_call: bool = False
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
    "grpo_batch_std": Advantage(function=grpo_batch_std, formula="(r - mean_g) / (std_batch + 1e-6)", centred=True),
    "rloo": Advantage(function=rloo, formula="r - mean of the others in g", centred=True),
    "reinforce": Advantage(function=reinforce, formula="r", group_relative=False),
    "none": Advantage(
        function=no_advantage, formula="0, whatever the reward", group_relative=False, needs_reward=False
    ),
    "remax": Advantage(function=remax, formula="r - r of the greedy rollout", group_relative=False, baseline=True),
    "reinforceplusplus": Advantage(
        function=reinforce_plus_plus, formula="(r - mean_batch) / (std_batch + 1e-6)", group_relative=False
    ),
    "opmd": Advantage(function=opmd, formula="r - mean_g, or r - tau log mean_g exp(r / tau)"),
    "asymre": Advantage(function=asymre, formula="r - mean_g - baseline_shift"),
    "rec": Advantage(function=rec, formula="r - mean_g", centred=True),
    "best_of_group": Advantage(function=best_of_group, formula="1 if r = max_g else 0"),
    "pass_at_k": Advantage(function=pass_at_k, formula="(R - m) / s of: one of k is right"),
    "gigpo": Advantage(
        function=gigpo, formula="r - mean_g + omega (return - mean of its state's returns in g)", per_call=True
    ),
    "step_rewards": Advantage(function=step_rewards, formula="return - mean of the group's returns", per_call=True),
    "gae": Advantage(
        function=call_rewards,
        formula="Σ_k (γ λ)^k δ_(t+k) of tokens t, δ_t = r_t + γ V_(t+1) - V_t, whitened over the step",
        group_relative=False,
        per_call=True,
        of_tokens=gae,
    ),
}
"""By their names in the configuration."""
