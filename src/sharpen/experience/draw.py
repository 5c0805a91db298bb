"""From scored groups to the batch of one update: advantages, normalization weights, and what was counted on the way.

In: groups and an `Algorithm`. Out: a `Batch`. Advantages are computed over all groups of a step (`score`); minibatches
are made by splitting the groups (`split_minibatches`) and drawing a batch from each part, whose weights are normalized
over that update alone, so that nothing is normalized twice. `draw_batches` does all of it for a step.

Shape suffixes: G scored rollouts of a group, R scored rollouts of a step, C trained calls of a step, T tokens of a
sequence, E loss tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from sharpen.algorithm.aggregation import token_weights
from sharpen.algorithm.presets import Algorithm
from sharpen.errors import CallError
from sharpen.experience.merge import merge, num_trainable_calls
from sharpen.experience.scores import scores_of
from sharpen.types import Experience, Group, Rollout

Advantages = npt.NDArray[np.float64]
"""Advantages of a rollout's calls, by their index (0 where a call is not trained)."""

Reason = Literal["small", "flat", "filtered"]
"""Why a group takes no part: too few rollouts that do (or no baseline with a reward, where the algorithm compares with
one), nothing to compare, or a mean reward out of bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one update trains on.

    `num_groups` counts the groups in the update, including the `num_zero_variance_groups` in which nothing differs of
    what is compared (`Algorithm.spread`): their advantages are exactly 0. They stay in the normalization, so that a
    trainer may skip what has no advantage when the algorithm has no KL or entropy term
    (`Algorithm.trains_zero_advantages`). `num_flat_groups` were dropped by `std_threshold`, `num_small_groups` because
    fewer than two of their rollouts take part, `num_filtered_groups` by the bounds of their mean reward; `left_out` has
    the reason of each by its id, `group_ids` are the others. `num_excluded_rollouts` have no reward,
    `num_unanswered_rollouts` received no answer of the model, so that their reward says nothing of it,
    `num_cut_rollouts` were left out because a token limit cut them. `num_zero_variance_tokens` is what the groups
    without spread cost in loss tokens. `reward_mean` and `reward_std` are of the recorded rewards, `reward_shaped_mean`
    of those that advantages were computed from; they are NaN, and not logged, where rollouts train without rewards.
    `rollout_weights` is the sum of the weights of each rollout's tokens, by rollout id. `experts` are the sequences of
    an expert's rows that train in the same update, if the algorithm has such a part (`num_expert_rows` is None if not),
    with weights of their own; nothing else counts them.
    """

    experiences: tuple[Experience, ...]
    num_groups: int
    num_zero_variance_groups: int
    num_flat_groups: int
    num_small_groups: int
    num_filtered_groups: int
    num_unanswered_rollouts: int
    num_cut_rollouts: int
    num_rollouts: int
    num_excluded_rollouts: int
    num_calls: int
    num_tokens: int
    num_loss_tokens: int
    num_zero_variance_tokens: int
    reward_mean: float
    reward_std: float
    reward_shaped_mean: float
    rollout_weights: Mapping[str, float]
    group_ids: tuple[str, ...]
    left_out: Mapping[str, Reason]
    experts: tuple[Experience, ...] = ()
    num_expert_rows: int | None = None
    num_expert_rows_too_long: int = 0

    def metrics(self) -> dict[str, float]:
        """The counts as numbers to log."""
        weights = self.rollout_weights.values()
        numbers: dict[str, float] = {
            "groups": self.num_groups,
            "groups_zero_variance": self.num_zero_variance_groups,
            "groups_dropped_flat": self.num_flat_groups,
            "groups_dropped_small": self.num_small_groups,
            "groups_dropped_filtered": self.num_filtered_groups,
            "rollouts": self.num_rollouts,
            "rollouts_excluded": self.num_excluded_rollouts,
            "rollouts_without_call": self.num_unanswered_rollouts,
            "rollouts_cut": self.num_cut_rollouts,
            "calls": self.num_calls,
            "sequences": len(self.experiences),
            "tokens": self.num_tokens,
            "loss_tokens": self.num_loss_tokens,
            "loss_tokens_zero_variance": self.num_zero_variance_tokens,
            "reward_mean": self.reward_mean,
            "reward_std": self.reward_std,
            "reward_shaped_mean": self.reward_shaped_mean,
            "rollout_weight_min": min(weights, default=0.0),
            "rollout_weight_max": max(weights, default=0.0),
            **self._expert_metrics(),
        }
        return {name: number for name, number in numbers.items() if not np.isnan(number)}

    def _expert_metrics(self) -> dict[str, float]:
        if self.num_expert_rows is None:
            return {}
        return {
            "expert_rows": self.num_expert_rows,
            "expert_rows_too_long": self.num_expert_rows_too_long,
            "expert_tokens": sum(_num_loss_tokens(experience) for experience in self.experts),
        }


def score(groups: Sequence[Group], algorithm: Algorithm) -> dict[str, Advantages]:
    """Advantages over the groups of a step: for each rollout that takes part, by its id, one for each of its calls.

    Groups that are left out (`left_out`) take no part.
    """
    rollouts = [
        algorithm.shaping.shaped(rollout)
        for group in groups
        if left_out(group, algorithm) is None
        for rollout in algorithm.shaping.taking_part(group.scored)
    ]
    if not rollouts:
        return {}
    baselines = {group.id: group.baseline.reward for group in groups if group.baseline is not None}
    advantages = iter(algorithm.advantages(scores_of(rollouts, baselines)).tolist())
    result = {rollout.id: np.zeros(len(rollout.calls)) for rollout in rollouts}
    for rollout in rollouts:
        for call in rollout.calls:
            if call.trainable:
                result[rollout.id][call.index] = next(advantages)
    return result


def make_batch(
    groups: Sequence[Group], algorithm: Algorithm, advantages: Mapping[str, Advantages] | None = None
) -> Batch:
    """Merge and weigh the groups of one update. `advantages` are those of the whole step (`score`); None: the groups
    are the whole step.

    Raises `CallError` and `SamplingError` as `merge` does, and `CallError` if a group holds a rollout of another task.
    """
    for group in groups:
        _check_members(group)
    if advantages is None:
        advantages = score(groups, algorithm)
    reasons = {group.id: reason for group in groups if (reason := left_out(group, algorithm)) is not None}
    scored = [rollout for group in groups for rollout in group.scored]
    taking_part = {group.id: algorithm.shaping.taking_part(group.scored) for group in groups}
    training = {id_: rollouts for id_, rollouts in taking_part.items() if id_ not in reasons}
    rollouts = [rollout for of_group in training.values() for rollout in of_group]
    shaped = {id_: [algorithm.shaping.shaped(rollout) for rollout in of_group] for id_, of_group in training.items()}
    flat = {id_ for id_, of_group in shaped.items() if _is_flat(of_group, algorithm)}
    experiences, rollout_weights = _weigh(rollouts, algorithm, advantages)
    rewards = _rewards(rollouts)
    nothing = float("nan") if rollouts else 0.0
    num_unanswered = sum(not rollout.answered for rollout in scored)
    return Batch(
        experiences=experiences,
        num_groups=len(training),
        num_zero_variance_groups=len(flat),
        num_flat_groups=list(reasons.values()).count("flat"),
        num_small_groups=list(reasons.values()).count("small"),
        num_filtered_groups=list(reasons.values()).count("filtered"),
        num_unanswered_rollouts=num_unanswered,
        num_cut_rollouts=len(scored) - num_unanswered - sum(map(len, taking_part.values())),
        num_rollouts=len(rollouts),
        num_excluded_rollouts=sum(len(group.rollouts) for group in groups) - len(scored),
        num_calls=sum(num_trainable_calls(rollout) for rollout in rollouts),
        num_tokens=sum(len(experience.ids_T) for experience in experiences),
        num_loss_tokens=sum(map(_num_loss_tokens, experiences)),
        num_zero_variance_tokens=sum(_num_loss_tokens(one) for one in experiences if one.group_id in flat),
        reward_mean=float(np.mean(rewards)) if rewards else nothing,
        reward_std=float(np.std(rewards)) if rewards else nothing,
        reward_shaped_mean=float(np.mean(_rewards(chain(*shaped.values())))) if rewards else nothing,
        rollout_weights=rollout_weights,
        group_ids=tuple(training),
        left_out=reasons,
    )


def draw_batches(groups: Sequence[Group], algorithm: Algorithm, num_minibatches: int) -> tuple[Batch, ...]:
    """The batches of a step, one for each minibatch that trains something; `groups` are those of the whole step."""
    advantages = score(groups, algorithm)
    parts = split_minibatches(groups, num_minibatches, algorithm)
    return tuple(make_batch(part, algorithm, advantages) for part in parts)


def split_minibatches(
    groups: Sequence[Group], num_minibatches: int, algorithm: Algorithm | None = None
) -> list[tuple[Group, ...]]:
    """The groups in `num_minibatches` parts, in order; fewer parts if there are fewer groups.

    The groups that train make parts of nearly equal size (those that `algorithm` leaves out go with the one before
    them; None: all train).
    """
    trains = [algorithm is None or left_out(group, algorithm) is None for group in groups]
    num_parts = min(num_minibatches, max(sum(trains), min(1, len(groups))))
    counted = list(accumulate(map(int, trains)))
    bounds = [sum(trains) * part // num_parts for part in range(1, num_parts)] if num_parts else []
    cuts = [counted.index(bound + 1) for bound in bounds]
    return [tuple(groups[start:end]) for start, end in pairwise((0, *cuts, len(groups)))] if groups else []


def _check_members(group: Group) -> None:
    for rollout in group.scored:
        if rollout.group_id != group.id or rollout.task_id != group.task.id:
            raise CallError(
                f"group {group.id} of task {group.task.id} holds rollout {rollout.id} of group {rollout.group_id}, "
                f"task {rollout.task_id}: advantages compare rollouts of one task only"
            )


def left_out(group: Group, algorithm: Algorithm) -> Reason | None:
    """Why a group takes no part in the update, if it does not: by how many of its rollouts do, by what the algorithm
    compares of them, both as it was recorded."""
    taking_part = algorithm.shaping.taking_part(group.scored)
    rewards = [rollout.reward for rollout in taking_part if rollout.reward is not None]
    if len(rewards if algorithm.needs_reward else taking_part) < (2 if algorithm.group_relative else 1):
        return "small"
    if algorithm.needs_baseline and not _has_baseline(group):
        return "small"
    threshold = algorithm.std_threshold
    if threshold is not None and len(rewards) > 1 and algorithm.spread(scores_of(taking_part, {})) <= threshold:
        return "flat"
    return None if algorithm.shaping.keeps(rewards) else "filtered"


def _has_baseline(group: Group) -> bool:
    return group.baseline is not None and group.baseline.scored and group.baseline.answered


def _is_flat(shaped: Sequence[Rollout], algorithm: Algorithm) -> bool:
    """Whether nothing differs of what is compared within a group."""
    return algorithm.needs_reward and algorithm.spread(scores_of(shaped, {})) == 0.0


def _rewards(rollouts: Iterable[Rollout]) -> list[float]:
    return [float(rollout.reward) for rollout in rollouts if rollout.reward is not None]


def _weigh(
    rollouts: Sequence[Rollout], algorithm: Algorithm, advantages: Mapping[str, Advantages]
) -> tuple[tuple[Experience, ...], dict[str, float]]:
    """The experiences of these rollouts with advantages and weights filled in, and the weight of each rollout."""
    sequences = [(one, number) for number, rollout in enumerate(rollouts) for one in merge(rollout)]
    if not sequences:
        return (), {rollout.id: 0.0 for rollout in rollouts}
    experiences, numbers = zip(*sequences, strict=True)
    lengths = [len(experience.ids_T) for experience in experiences]
    first_calls = np.cumsum([0, *(len(rollout.calls) for rollout in rollouts)])[list(numbers)]
    # Here T runs over the tokens of all sequences, one after the other.
    mask_T = np.concatenate([experience.loss_mask_T for experience in experiences])
    calls_T = np.concatenate([experience.calls_T for experience in experiences]) + np.repeat(first_calls, lengths)
    rollouts_E, calls_E = np.repeat(numbers, lengths)[mask_T], calls_T[mask_T]
    weights_E = token_weights(algorithm.aggregation, rollouts_E, calls_E, length=algorithm.constant_length)
    weights_T, advantages_T = np.zeros(len(mask_T), np.float32), np.zeros(len(mask_T), np.float32)
    weights_T[mask_T] = weights_E
    advantages_T[mask_T] = np.concatenate([advantages[rollout.id] for rollout in rollouts])[calls_E]
    bounds = np.cumsum(lengths)[:-1]
    filled = tuple(
        replace(experience, advantages_T=of_advantages_T, weights_T=of_weights_T)
        for experience, of_advantages_T, of_weights_T in zip(
            experiences, np.split(advantages_T, bounds), np.split(weights_T, bounds), strict=True
        )
    )
    sums = np.bincount(rollouts_E, weights_E, minlength=len(rollouts)).tolist()
    return filled, {rollout.id: weight for rollout, weight in zip(rollouts, sums, strict=True)}


def _num_loss_tokens(experience: Experience) -> int:
    return int(np.count_nonzero(experience.loss_mask_T))
