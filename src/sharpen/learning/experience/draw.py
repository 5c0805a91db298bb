"""Makes the batch of an update from scored groups: sequences with advantages and weights, and counts.

In: groups and an `Algorithm`. Out: a `Batch`. Advantages are computed over all groups of a step (`score`). The groups
are split into minibatches (`split_minibatches`), and a batch is made from each, with weights normalized over that
update. `draw_batches` does all this for a step.

Shape suffixes: G scored rollouts of a group, R scored rollouts of a step, C trained calls of a step, T tokens of a
sequence, E loss tokens of the batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sharpen.errors import CallError
from sharpen.learning.algorithm.aggregation import token_weights
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.returns import Scores
from sharpen.learning.algorithm.role_baseline import Roles, moved
from sharpen.learning.experience.merge import merge, num_trainable_calls
from sharpen.types import Call, Experience, Group, Rollout

# Collects the scores of rollouts, from which advantages are computed.
#
# In: rollouts that take part, with the rewards to train on. Out: `Scores`. A step reward belongs to the trained call
# that earned it, or to the last trained call before; step rewards before the first trained call only count in the
# episode's return. A state is identified by the name that the workflow gave it, or else by what the environment showed.
#
# Shape suffixes: R rollouts, C trained calls.


def scores_of(rollouts: Sequence[Rollout], baselines: Mapping[str, float | None]) -> Scores:
    """Return the scores of rollouts; `baselines` are, by group id, the greedy rollouts' rewards, or those of roles."""
    trained = [[call for call in rollout.calls if call.trainable] for rollout in rollouts]
    calls = [(rollout, call) for rollout, own in zip(rollouts, trained, strict=True) for call in own]
    groups = {id_: number for number, id_ in enumerate(dict.fromkeys(rollout.group_id for rollout in rollouts))}
    states: dict[str, int] = {}
    return Scores(
        rewards_R=np.array([rollout.reward for rollout in rollouts], np.float64),
        returns_R=np.array([_return(rollout) for rollout in rollouts], np.float64),
        groups_R=np.array([groups[rollout.group_id] for rollout in rollouts], np.int64),
        rollouts_C=np.repeat(np.arange(len(rollouts)), [len(own) for own in trained]),
        step_rewards_C=np.array(
            [reward for pair in zip(rollouts, trained, strict=True) for reward in _step_rewards(*pair)], np.float64
        ),
        call_rewards_C=np.array([rollout.call_rewards.get(call.index, np.nan) for rollout, call in calls], np.float64),
        states_C=np.array([states.setdefault(state_of(*pair), len(states)) for pair in calls], np.int64),
        num_tokens_C=np.array([len(call.sampled_ids_S) for _, call in calls], np.int64),
        baselines_R=np.array([_number(baselines.get(rollout.group_id)) for rollout in rollouts], np.float64),
        metrics_R=np.array([rollout.metrics for rollout in rollouts], np.object_),
    )


def state_of(rollout: Rollout, call: Call) -> str:
    """Return a key for the state in which a call was made: the name that the workflow gave it, or else the messages
    since the model's last answer. Only named states can be the same in different groups."""
    name = rollout.states.get(call.index)
    if name is not None:
        return f"told {name}"
    return f"shown in {rollout.group_id} {json.dumps(shown(call.messages), sort_keys=True, default=repr)}"


def shown(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str | None, Any]]:
    """Return role, tool name and content of the messages after the model's last answer, without `system` and
    `developer` messages. Tools are identified by name, since the ids of tool calls differ between rollouts."""
    end = len(messages)
    while end and messages[end - 1].get("role") == "assistant":  # a prefix of the requested answer
        end -= 1
    start = end
    while start and messages[start - 1].get("role") != "assistant":
        start -= 1
    tool_calls = messages[start - 1].get("tool_calls") if start else None
    names = {call.get("id"): call.get("function", {}).get("name") for call in tool_calls or ()}
    return [
        (str(message.get("role")), names.get(message.get("tool_call_id")), _text(message.get("content")))
        for message in messages[start:end]
        if message.get("role") not in ("system", "developer")
    ]


def _text(content: Any) -> Any:
    """Join a content of several parts if all of them are text; return others unchanged."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text")) for part in content)
    return content


def _return(rollout: Rollout) -> float:
    return sum(rollout.step_rewards.values()) if rollout.step_rewards else _number(rollout.reward)


def _step_rewards(rollout: Rollout, trained: Sequence[Call]) -> list[float]:
    """Return the sum of step rewards from each trained call to the next; NaN if the rollout has no step rewards."""
    if not rollout.step_rewards:
        return [np.nan] * len(trained)
    bounds = [*(call.index for call in trained), len(rollout.calls)]
    return [sum(rollout.step_rewards.get(index, 0.0) for index in range(start, end)) for start, end in pairwise(bounds)]


def _number(reward: float | None) -> float:
    return np.nan if reward is None else reward


Advantages = npt.NDArray[np.float64]
"""Advantages of a rollout's calls by index; 0 for calls that are not trained."""

Reason = Literal["small", "flat", "filtered"]
"""Why a group is left out: `small`, too few of its rollouts take part (or it has no scored baseline, if the algorithm
needs one); `flat`, its spread is at most `std_threshold`; `filtered`, its mean reward is out of bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of one update, and counts.

    `num_groups` counts the groups in the update. It includes the `num_zero_variance_groups`, whose compared values are
    all equal (`Algorithm.spread`), so that their advantages are exactly 0; they have `num_zero_variance_tokens` loss
    tokens. They count in the normalization, even if the trainer skips them (`Algorithm.trains_zero_advantages`).
    `left_out` has the `Reason` for each group that is not in the update (`num_flat_groups`, `num_small_groups` and
    `num_filtered_groups` in total), `group_ids` are the others.

    Of the `num_loss_tokens`, `num_truncated_tokens` were sampled with `top_p`, `top_k` or `min_p` and no record of what
    these left. `num_excluded_rollouts` have no reward, `num_unanswered_rollouts` received no answer of the model, so
    their reward says nothing about it, and `num_cut_rollouts` were left out because they hit a token limit.
    `reward_mean` and `reward_std` are those of the recorded rewards, `reward_shaped_mean` that of the rewards used for
    advantages; they are NaN, and not logged, if rollouts are trained without rewards. `rollout_weights` is the sum of
    the token weights of each rollout, by id.

    `experts` are the sequences of an expert's rows in the same update, with weights of their own; no other count
    includes them. `num_expert_rows` is None if the algorithm has no expert loss.
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
    num_truncated_tokens: int
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
        """Return the counts as metrics."""
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
            "loss_tokens_truncated": self.num_truncated_tokens,
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


def score(groups: Sequence[Group], algorithm: Algorithm, roles: Roles | None = None) -> dict[str, Advantages]:
    """Compute advantages over the groups of a step. Return those of each rollout that takes part, by its id, with one
    for each of its calls. Groups that are left out (`left_out`) take no part. `roles` are the baselines of roles before
    the step."""
    rollouts = [rollout for members in _trained(groups, algorithm).values() for rollout in members]
    if not rollouts:
        return {}
    baselines = {group.id: group.baseline.reward for group in groups if group.baseline is not None}
    if algorithm.by_role:
        baselines = {group.id: (roles or {}).get(algorithm.role_of(group.task), 0.0) for group in groups}
    advantages = iter(algorithm.advantages(scores_of(rollouts, baselines)).tolist())
    result = {rollout.id: np.zeros(len(rollout.calls)) for rollout in rollouts}
    for rollout in rollouts:
        for call in rollout.calls:
            if call.trainable:
                result[rollout.id][call.index] = next(advantages)
    return result


def roles_after(groups: Sequence[Group], algorithm: Algorithm, roles: Roles) -> Roles:
    """Return the baselines of roles after a step: moved by the rewards, as shaped, of all rollouts that take part."""
    if not algorithm.by_role:
        return roles
    rewards: dict[str, list[float]] = {}
    trained = _trained(groups, algorithm)
    for group in groups:
        rewards.setdefault(algorithm.role_of(group.task), []).extend(_rewards(trained.get(group.id, ())))
    return moved(roles, rewards, decay=algorithm.decay)


def _trained(groups: Sequence[Group], algorithm: Algorithm) -> dict[str, list[Rollout]]:
    """Return the rollouts that take part, with shaped rewards, by group id."""
    return {
        group.id: algorithm.shaping.shaped_group(algorithm.shaping.taking_part(group.scored))
        for group in groups
        if left_out(group, algorithm) is None
    }


def make_batch(
    groups: Sequence[Group], algorithm: Algorithm, advantages: Mapping[str, Advantages] | None = None
) -> Batch:
    """Make the batch of one update from its groups. `advantages` are those of the whole step (`score`); None means that
    these groups are the whole step.

    Raises `CallError` and `SamplingError` like `merge`, `CallError` if a group holds a rollout of another group or
    task, and `DatasetError` if a task has none of several teachers.
    """
    for group in groups:
        _check_members(group)
    if advantages is None:
        advantages = score(groups, algorithm)
    reasons = {group.id: reason for group in groups if (reason := left_out(group, algorithm)) is not None}
    scored = [rollout for group in groups for rollout in group.scored]
    taking_part = {group.id: algorithm.shaping.taking_part(group.scored) for group in groups}
    training = {id_: rollouts for id_, rollouts in taking_part.items() if id_ not in reasons}
    rollouts = [rollout for members in training.values() for rollout in members]
    shaped = {id_: algorithm.shaping.shaped_group(members) for id_, members in training.items()}
    flat = {id_ for id_, members in shaped.items() if _is_flat(members, algorithm)}
    experiences, rollout_weights = _make_experiences(rollouts, algorithm, advantages)
    if (distill := algorithm.distill) is not None and distill.teachers:
        teachers = {group.id: distill.teacher_of(group.task) for group in groups if group.id in training}
        experiences = tuple(replace(one, teacher=teachers[one.group_id]) for one in experiences)
    rewards = _rewards(rollouts)
    no_reward = float("nan") if rollouts else 0.0
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
        num_truncated_tokens=sum(int(np.count_nonzero(one.truncated_T)) for one in experiences),
        num_zero_variance_tokens=sum(_num_loss_tokens(one) for one in experiences if one.group_id in flat),
        reward_mean=float(np.mean(rewards)) if rewards else no_reward,
        reward_std=float(np.std(rewards)) if rewards else no_reward,
        reward_shaped_mean=float(np.mean(_rewards(chain(*shaped.values())))) if rewards else no_reward,
        rollout_weights=rollout_weights,
        group_ids=tuple(training),
        left_out=reasons,
    )


def draw_batches(
    groups: Sequence[Group], algorithm: Algorithm, num_minibatches: int, roles: Roles | None = None
) -> tuple[Batch, ...]:
    """Return the batches of a step, one per minibatch; `groups` are those of the whole step, `roles` the baselines of
    roles before it."""
    advantages = score(groups, algorithm, roles)
    parts = split_minibatches(groups, num_minibatches, algorithm)
    return tuple(make_batch(part, algorithm, advantages) for part in parts)


def split_minibatches(
    groups: Sequence[Group], num_minibatches: int, algorithm: Algorithm | None = None
) -> list[tuple[Group, ...]]:
    """Split groups into `num_minibatches` parts, in order; fewer parts if there are fewer groups to train.

    The parts have nearly equal numbers of groups to train. A group that `algorithm` leaves out joins the part of the
    one before it; if `algorithm` is None, all are trained.
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
    """Return why a group is left out of the update, or None if it is not. This depends on the recorded rewards, not the
    shaped ones."""
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
    """Whether all values that the advantage compares within a group are equal."""
    return algorithm.needs_reward and algorithm.spread(scores_of(shaped, {})) == 0.0


def _rewards(rollouts: Iterable[Rollout]) -> list[float]:
    return [float(rollout.reward) for rollout in rollouts if rollout.reward is not None]


def _make_experiences(
    rollouts: Sequence[Rollout], algorithm: Algorithm, advantages: Mapping[str, Advantages]
) -> tuple[tuple[Experience, ...], dict[str, float]]:
    """Merge rollouts into experiences with advantages and weights. Return them, and the weight of each rollout."""
    sequences = [
        (one, number)
        for number, rollout in enumerate(rollouts)
        for one in merge(rollout, needs_ratio=algorithm.needs_ratio)
    ]
    if not sequences:
        return (), {rollout.id: 0.0 for rollout in rollouts}
    experiences, numbers = zip(*sequences, strict=True)
    lengths = [len(experience.ids_T) for experience in experiences]
    first_calls = np.cumsum([0, *(len(rollout.calls) for rollout in rollouts)])[list(numbers)]
    # Below, T runs over the concatenated tokens of all sequences.
    mask_T = np.concatenate([experience.loss_mask_T for experience in experiences])
    calls_T = np.concatenate([experience.calls_T for experience in experiences]) + np.repeat(first_calls, lengths)
    rollouts_E, calls_E = np.repeat(numbers, lengths)[mask_T], calls_T[mask_T]
    weights_E = token_weights(algorithm.aggregation, rollouts_E, calls_E, length=algorithm.constant_length)
    weights_T, advantages_T = np.zeros(len(mask_T), np.float32), np.zeros(len(mask_T), np.float32)
    weights_T[mask_T] = weights_E
    advantages_T[mask_T] = np.concatenate([advantages[rollout.id] for rollout in rollouts])[calls_E]
    bounds = np.cumsum(lengths)[:-1]
    weighted = tuple(
        replace(experience, advantages_T=own_advantages_T, weights_T=own_weights_T)
        for experience, own_advantages_T, own_weights_T in zip(
            experiences, np.split(advantages_T, bounds), np.split(weights_T, bounds), strict=True
        )
    )
    sums = np.bincount(rollouts_E, weights_E, minlength=len(rollouts)).tolist()
    return weighted, {rollout.id: weight for rollout, weight in zip(rollouts, sums, strict=True)}


def _num_loss_tokens(experience: Experience) -> int:
    return int(np.count_nonzero(experience.loss_mask_T))
