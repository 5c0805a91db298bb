"""What the rollouts of a step brought: their rewards, and the returns of their calls.

In: rewards of rollouts, and of steps where the owner gave them. Out: `Scores`, which advantages are computed from, and
sums over the calls that follow.

A rollout's reward is one reward, however many calls the rollout made: it comes after the last of them. Rewards of steps
are another thing: they come after the calls that earned them, and the return of the episode is their sum.

Shape suffixes: R rollouts of the step, C trained calls of the step, G members of one set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What advantages are computed from.

    `groups_R` numbers the rollouts' groups, `rollouts_C` the calls' rollouts (calls of a rollout in order).
    `step_rewards_C` adds up the rewards of steps from each call to the next one; NaN in rollouts without such rewards.
    `returns_R` are the episodes' returns: the sum of the rewards of steps, else the reward. `call_rewards_C` is what
    the workflow wrote on a call as its reward, NaN where it wrote none. Calls of a group with the same `states_C` were
    made in the same state of the environment. `num_tokens_C` counts the trained tokens. `baselines_R` is the reward of
    the greedy rollout of each rollout's task, None where there was none.
    """

    rewards_R: FloatArray
    returns_R: FloatArray
    groups_R: IndexArray
    rollouts_C: IndexArray
    step_rewards_C: FloatArray
    call_rewards_C: FloatArray
    states_C: IndexArray
    num_tokens_C: IndexArray
    baselines_R: FloatArray | None = None

    @classmethod
    def of_rollouts(cls, rewards: Any, groups: Any = None, num_calls: Any = None) -> Scores:
        """Scores of rollouts with nothing known of their calls but how many they made (default: one each)."""
        rewards_R = np.asarray(rewards, np.float64)
        counts_R = np.ones(len(rewards_R), np.int64) if num_calls is None else np.asarray(num_calls, np.int64)
        num = int(counts_R.sum())
        return cls(
            rewards_R=rewards_R,
            returns_R=rewards_R,
            groups_R=np.zeros(len(rewards_R), np.int64) if groups is None else np.asarray(groups, np.int64),
            rollouts_C=np.repeat(np.arange(len(rewards_R)), counts_R),
            step_rewards_C=np.full(num, np.nan),
            call_rewards_C=np.full(num, np.nan),
            states_C=np.arange(num),
            num_tokens_C=np.ones(num, np.int64),
        )

    def per_call(self, values_R: FloatArray) -> FloatArray:
        """Each rollout's value for each of its calls."""
        return values_R[self.rollouts_C]


def rewards_after_calls(scores: Scores) -> FloatArray:
    """The reward that comes after each call and before the next, shape C: rewards of steps where the owner gave them,
    else the rollout's reward after its last call and 0 after the others."""
    finite(scores.rewards_R)
    rewards_C = np.nan_to_num(scores.step_rewards_C, nan=0.0)
    for rollout, places in zip(np.unique(scores.rollouts_C), members(scores.rollouts_C), strict=True):
        if np.isnan(scores.step_rewards_C[places]).all():
            rewards_C[places[-1]] = scores.rewards_R[rollout]
    return rewards_C


def discounted_returns(scores: Scores, gamma: float) -> FloatArray:
    """Return of each call: the reward after it plus `gamma` times the return of the rollout's next call, shape C."""
    rewards_C = rewards_after_calls(scores)
    returns_C = np.zeros(len(rewards_C))
    for places in members(scores.rollouts_C):
        following = 0.0
        for place in places[::-1].tolist():
            following = rewards_C[place] + gamma * following
            returns_C[place] = following
    return returns_C


def rewards_of_calls(scores: Scores) -> FloatArray:
    """For each call by itself what the workflow wrote on it, else the reward of its rollout, shape C. Never to be added
    up over the calls of a rollout."""
    return np.where(np.isnan(scores.call_rewards_C), scores.per_call(finite(scores.rewards_R)), scores.call_rewards_C)


def same_state(scores: Scores, across_tasks: bool) -> list[IndexArray]:
    """The places of the calls that were made in one state: of one group, or of the whole step."""
    groups_C = np.zeros_like(scores.states_C) if across_tasks else scores.groups_R[scores.rollouts_C]
    _, states_C = np.unique(np.stack([groups_C, scores.states_C]), axis=1, return_inverse=True)
    return members(states_C.ravel())


def members(numbers: IndexArray) -> list[IndexArray]:
    """The places of each number, in ascending order of the numbers."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []


def finite(rewards_R: FloatArray) -> FloatArray:
    """The same rewards. Raises `ValueError` if one is NaN or infinite."""
    if rewards_R.ndim != 1 or not np.isfinite(rewards_R).all():
        raise ValueError(f"rewards must be finite numbers, one per rollout; got {rewards_R.tolist()}")
    return rewards_R


def zero_mean(values_G: FloatArray) -> FloatArray:
    """The values minus their mean; exactly 0 where all are the same."""
    # Subtracting one member first makes equal values exactly zero, where subtracting a rounded mean would not.
    shifted_G = values_G - values_G[:1]
    centred_G: FloatArray = shifted_G - shifted_G.mean() if len(values_G) else shifted_G
    return centred_G


def unbiased_std(centred_G: FloatArray) -> float:
    """The unbiased standard deviation of values that were centred; 0 for fewer than two."""
    return float(np.sqrt(np.square(centred_G).sum() / max(len(centred_G) - 1, 1)))


def std(values_G: FloatArray) -> float:
    """Unbiased standard deviation; exactly 0.0 if and only if all values are the same. Raises `ValueError` for one that
    is not finite."""
    return unbiased_std(zero_mean(finite(np.asarray(values_G, np.float64))))
