"""The rewards of a step's rollouts, and the returns of their calls.

In: rewards of rollouts and, if the workflow gave any, of steps. Out: `Scores`, from which advantages are computed, and
discounted sums over calls.

A rollout has one reward, however many calls it made: it comes after the last one. Step rewards are different: each
comes after the call that earned it, and the return of the episode is their sum.

Shape suffixes: R rollouts of the step, C trained calls of the step, G members of one set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sharpen.types import metric_named

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]
OWN_REWARD = "reward"
"""The name of a rollout's reward among the names of its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The input of advantage functions.

    `groups_R` is the number of each rollout's group, `rollouts_C` that of each call's rollout (calls of a rollout in
    order). `step_rewards_C` is the sum of step rewards from each call to the next; NaN in rollouts without any.
    `returns_R` are the episodes' returns: the sum of step rewards, or else the reward. `call_rewards_C` is the reward
    that the workflow set on a call, NaN if none. Calls of a group with equal `states_C` were made in the same state of
    the environment. `num_tokens_C` counts trained tokens. `baselines_R` is the reward of the greedy rollout of each
    rollout's task, or the baseline of its role; None without either. `metrics_R` are what was measured of each rollout,
    by name.
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
    metrics_R: npt.NDArray[np.object_] | None = None

    @classmethod
    def of_rollouts(cls, rewards: Any, groups: Any = None, num_calls: Any = None) -> Scores:
        """Make scores from rewards only, with a number of calls per rollout (default: one each)."""
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

    def named(self, name: str) -> FloatArray:
        """Return a reward of each rollout by its name, shape R: a metric, or `reward`, the rollout's own. Raises
        `ValueError` for a rollout without it."""
        if name == OWN_REWARD:
            return self.rewards_R
        metrics = [{}] * len(self.rewards_R) if self.metrics_R is None else self.metrics_R.tolist()
        values = [metric_named(of_rollout, name) for of_rollout in metrics]
        if None in values:
            known = ", ".join(sorted(metrics[values.index(None)])) or "none"
            raise ValueError(f"a rollout has no metric {name!r} (it has {known})")
        return np.array(values, np.float64)

    def per_call(self, values_R: FloatArray) -> FloatArray:
        """Return, for each call, the value of its rollout, shape C."""
        return values_R[self.rollouts_C]


def rewards_after_calls(scores: Scores) -> FloatArray:
    """Return the reward between each call and the next, shape C: the step rewards if the rollout has any, else its
    reward after the last call and 0 after the others."""
    finite(scores.rewards_R)
    rewards_C = np.nan_to_num(scores.step_rewards_C, nan=0.0)
    for rollout, places in zip(np.unique(scores.rollouts_C), members(scores.rollouts_C), strict=True):
        if np.isnan(scores.step_rewards_C[places]).all():
            rewards_C[places[-1]] = scores.rewards_R[rollout]
    return rewards_C


def discounted_returns(scores: Scores, gamma: float) -> FloatArray:
    """Compute the return of each call, shape C: the reward after it plus `gamma` times the return of the next call."""
    rewards_C = rewards_after_calls(scores)
    returns_C = np.zeros(len(rewards_C))
    for places in members(scores.rollouts_C):
        following = 0.0
        for place in places[::-1].tolist():
            following = rewards_C[place] + gamma * following
            returns_C[place] = following
    return returns_C


def rewards_of_calls(scores: Scores) -> FloatArray:
    """Return the reward set on each call, or else that of its rollout, shape C. Do not add these up over a rollout."""
    return np.where(np.isnan(scores.call_rewards_C), scores.per_call(finite(scores.rewards_R)), scores.call_rewards_C)


def same_state(scores: Scores, across_tasks: bool) -> list[IndexArray]:
    """Group the calls made in the same state, of one group or (`across_tasks`) of the whole step. Return the indices of
    each set."""
    groups_C = np.zeros_like(scores.states_C) if across_tasks else scores.groups_R[scores.rollouts_C]
    _, states_C = np.unique(np.stack([groups_C, scores.states_C]), axis=1, return_inverse=True)
    return members(states_C.ravel())


def members(numbers: IndexArray) -> list[IndexArray]:
    """Return the indices at which each number occurs, in ascending order of the numbers."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []


def finite(rewards_R: FloatArray) -> FloatArray:
    """Return the rewards unchanged. Raises `ValueError` if one is NaN or infinite."""
    if rewards_R.ndim != 1 or not np.isfinite(rewards_R).all():
        raise ValueError(f"rewards must be finite numbers, one per rollout; got {rewards_R.tolist()}")
    return rewards_R


def zero_mean(values_G: FloatArray) -> FloatArray:
    """Subtract the mean; the result is exactly 0 if all values are equal."""
    # Subtracting one member first makes equal values exactly zero; subtracting a rounded mean would not.
    shifted_G = values_G - values_G[:1]
    centred_G: FloatArray = shifted_G - shifted_G.mean() if len(values_G) else shifted_G
    return centred_G


def unbiased_std(centred_G: FloatArray) -> float:
    """Return the unbiased standard deviation of values with mean 0; 0 for fewer than two."""
    return float(np.sqrt(np.square(centred_G).sum() / max(len(centred_G) - 1, 1)))


def std(values_G: FloatArray) -> float:
    """Return the unbiased standard deviation, exactly 0.0 if and only if all values are equal. Raises `ValueError` for
    NaN or infinite values."""
    return unbiased_std(zero_mean(finite(np.asarray(values_G, np.float64))))
