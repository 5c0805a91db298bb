"""From scored groups to the batch of one update: advantages, normalization weights, and what was counted on the way.

In: groups and an `Algorithm`. Out: a `Batch`. Minibatches are made by splitting a step's groups first
(`split_minibatches`) and drawing a batch from each part: advantages never look beyond a group, and weights are
normalized over the update that they belong to, so that nothing is normalized twice.

Shape suffixes: G scored rollouts of a group, T tokens of a sequence, E loss tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agenttune.algorithm.aggregation import token_weights
from agenttune.algorithm.presets import Algorithm
from agenttune.errors import CallError
from agenttune.experience.merge import merge, num_trainable_calls
from agenttune.types import Experience, Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one update trains on.

    `num_groups` counts the groups in the update, including the `num_zero_variance_groups` whose rewards are all the
    same: their advantages are exactly 0 and they stay in the normalization, so that a trainer may skip computing them
    when the algorithm has no KL or entropy term (`Algorithm.trains_zero_advantages`). `num_flat_groups` were dropped
    by `std_threshold`, `num_small_groups` because fewer than two of their rollouts are scored.
    `num_excluded_rollouts` have no reward. `num_zero_variance_tokens` is what the groups without spread cost in loss
    tokens. `rollout_weights` is the sum of the weights of each rollout's tokens, by rollout id.
    """

    experiences: tuple[Experience, ...]
    num_groups: int
    num_zero_variance_groups: int
    num_flat_groups: int
    num_small_groups: int
    num_rollouts: int
    num_excluded_rollouts: int
    num_calls: int
    num_tokens: int
    num_loss_tokens: int
    num_zero_variance_tokens: int
    reward_mean: float
    reward_std: float
    rollout_weights: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """The counts as numbers to log."""
        weights = self.rollout_weights.values()
        return {
            "groups": self.num_groups,
            "groups_zero_variance": self.num_zero_variance_groups,
            "groups_dropped_flat": self.num_flat_groups,
            "groups_dropped_small": self.num_small_groups,
            "rollouts": self.num_rollouts,
            "rollouts_excluded": self.num_excluded_rollouts,
            "calls": self.num_calls,
            "sequences": len(self.experiences),
            "tokens": self.num_tokens,
            "loss_tokens": self.num_loss_tokens,
            "loss_tokens_zero_variance": self.num_zero_variance_tokens,
            "reward_mean": self.reward_mean,
            "reward_std": self.reward_std,
            "rollout_weight_min": min(weights, default=0.0),
            "rollout_weight_max": max(weights, default=0.0),
        }


@dataclass(slots=True)
class _Draw:
    """What is gathered so far. `sequences` holds (experience, advantage, rollout number, number of its first call)."""

    sequences: list[tuple[Experience, float, int, int]] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_groups: int = 0
    num_zero_variance: int = 0
    num_zero_variance_tokens: int = 0
    num_flat: int = 0
    num_small: int = 0
    num_excluded: int = 0
    num_calls: int = 0


def make_batch(groups: Sequence[Group], algorithm: Algorithm) -> Batch:
    """Merge, score and weigh the groups of one update.

    Raises `CallError` and `SamplingError` as `merge` does, and `CallError` if a group holds a rollout of another task.
    """
    draw = _Draw()
    for group in groups:
        _add_group(draw, group, algorithm)
    experiences, rollout_weights = _weigh(draw, algorithm)
    return Batch(
        experiences=experiences,
        num_groups=draw.num_groups,
        num_zero_variance_groups=draw.num_zero_variance,
        num_flat_groups=draw.num_flat,
        num_small_groups=draw.num_small,
        num_rollouts=len(draw.rollouts),
        num_excluded_rollouts=draw.num_excluded,
        num_calls=sum(num_trainable_calls(rollout) for rollout in draw.rollouts),
        num_tokens=sum(len(experience.ids_T) for experience in experiences),
        num_loss_tokens=sum(_num_loss_tokens(experience) for experience in experiences),
        num_zero_variance_tokens=draw.num_zero_variance_tokens,
        reward_mean=float(np.mean(draw.rewards)) if draw.rewards else 0.0,
        reward_std=float(np.std(draw.rewards)) if draw.rewards else 0.0,
        rollout_weights=rollout_weights,
    )


def split_minibatches(groups: Sequence[Group], num_minibatches: int) -> list[tuple[Group, ...]]:
    """The groups in `num_minibatches` parts of nearly equal size, in order; fewer parts if there are fewer groups."""
    num_parts = min(num_minibatches, len(groups))
    return [
        tuple(groups[len(groups) * part // num_parts : len(groups) * (part + 1) // num_parts])
        for part in range(num_parts)
    ]


def _add_group(draw: _Draw, group: Group, algorithm: Algorithm) -> None:
    scored = group.scored
    for rollout in scored:
        if rollout.group_id != group.id or rollout.task_id != group.task.id:
            raise CallError(
                f"group {group.id} of task {group.task.id} holds rollout {rollout.id} of group {rollout.group_id}, "
                f"task {rollout.task_id}: advantages compare rollouts of one task only"
            )
    draw.num_excluded += len(group.rollouts) - len(scored)
    if len(scored) < (2 if algorithm.group_relative else 1):
        draw.num_small += 1
        return
    rewards_G = np.array([rollout.reward for rollout in scored], dtype=np.float64)
    num_calls_G = np.array([num_trainable_calls(rollout) for rollout in scored])
    advantages_G = algorithm.advantages(rewards_G, num_calls_G)
    if advantages_G is None:
        draw.num_flat += 1
        return
    num_before = len(draw.sequences)
    for rollout, reward, advantage in zip(scored, rewards_G.tolist(), advantages_G.tolist(), strict=True):
        for experience in merge(rollout, needs_ratio=algorithm.needs_ratio):
            draw.sequences.append((experience, advantage, len(draw.rollouts), draw.num_calls))
        draw.rollouts.append(rollout)
        draw.rewards.append(reward)
        draw.num_calls += len(rollout.calls)
    draw.num_groups += 1
    if np.all(rewards_G == rewards_G[0]):
        draw.num_zero_variance += 1
        draw.num_zero_variance_tokens += sum(_num_loss_tokens(sequence[0]) for sequence in draw.sequences[num_before:])


def _weigh(draw: _Draw, algorithm: Algorithm) -> tuple[tuple[Experience, ...], dict[str, float]]:
    """The experiences with advantages and weights filled in, and the weight of each rollout."""
    weight_of = {rollout.id: 0.0 for rollout in draw.rollouts}
    if not draw.sequences:
        return (), weight_of
    experiences, advantages, rollouts, first_calls = zip(*draw.sequences, strict=True)
    lengths = [len(experience.ids_T) for experience in experiences]
    # Here T runs over the tokens of all sequences, one after the other.
    mask_T = np.concatenate([experience.loss_mask_T for experience in experiences])
    calls_T = np.concatenate([experience.calls_T for experience in experiences]) + np.repeat(first_calls, lengths)
    rollouts_E = np.repeat(rollouts, lengths)[mask_T]
    weights_E = token_weights(algorithm.aggregation, rollouts_E, calls_T[mask_T])
    weights_T = np.zeros(len(mask_T), dtype=np.float32)
    weights_T[mask_T] = weights_E
    advantages_T = np.where(mask_T, np.repeat(advantages, lengths), 0.0).astype(np.float32)
    bounds = np.cumsum(lengths)[:-1]
    filled = tuple(
        replace(experience, advantages_T=of_advantages_T, weights_T=of_weights_T)
        for experience, of_advantages_T, of_weights_T in zip(
            experiences, np.split(advantages_T, bounds), np.split(weights_T, bounds), strict=True
        )
    )
    sums = np.bincount(rollouts_E, weights_E, minlength=len(draw.rollouts)).tolist()
    return filled, dict(zip(weight_of, sums, strict=True))


def _num_loss_tokens(experience: Experience) -> int:
    return int(np.count_nonzero(experience.loss_mask_T))
