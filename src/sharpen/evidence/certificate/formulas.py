"""The advantages, implemented a second time: each written out plainly from its source, to compare with
`algorithm.advantages`.

In: the `Member`s of a step, group by group, with their rewards. Out: one number for each trained call, by rollout and
call. Nothing is shared with the code that is checked: no function, no table, no rounding rule.

The sources are those of `docs/reference/algorithms.md`. Shape suffixes: G members of a group, C trained calls that are
compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SMALL = 1e-6
"""Added to standard deviations before dividing by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """A call that trains. `reward_after` is the reward between this call and the next trained one, `own_reward` the
    call's own reward (else the rollout's). `state` is what the agent saw; `reported` is whether the workflow named that
    state itself."""

    index: int
    num_tokens: int
    reward_after: float = 0.0
    own_reward: float = 0.0
    state: str = ""
    reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rollout that takes part: its reward after over-long punishment, the sum of its step rewards (its reward if it
    has none), the reward of its group's greedy rollout (or the baseline of its role), what was measured of it, and its
    trained calls in order."""

    rollout_id: str
    group_id: str
    reward: float
    episode: float
    baseline: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    calls: tuple[CallTerms, ...] = ()


Groups = Sequence[Sequence[Member]]
PerCall = dict[tuple[str, int], float]
"""A number for each trained call, by (rollout id, call index)."""


def _of_rollouts(groups: Groups, numbers: Callable[[Sequence[Member]], Sequence[float] | Array]) -> PerCall:
    """Compute one number for each member of a group, and give it to all calls of the member."""
    result: PerCall = {}
    for members in groups:
        for member, number in zip(members, numbers(members), strict=True):
            result |= {(member.rollout_id, call.index): float(number) for call in member.calls}
    return result


def _rewards(members: Sequence[Member]) -> Array:
    return np.array([member.reward for member in members], np.float64)


def _std(values: Array) -> float:
    """Return the unbiased standard deviation; 0 for a single value."""
    if len(values) < 2 or (values == values[0]).all():
        return 0.0
    return math.sqrt(math.fsum((values - values.mean()) ** 2) / (len(values) - 1))


def _group_relative(members: Sequence[Member], std_normalize: bool = True) -> Array:
    rewards_G = _rewards(members)
    advantages_G: Array = (rewards_G - rewards_G.mean()) / (_std(rewards_G) + SMALL if std_normalize else 1.0)
    return advantages_G


def _shares(members: Sequence[Member], step_norm: bool) -> Array:
    """Return the divisor of each member's number: its number of trained calls with `step_norm`, else 1."""
    return np.array([max(len(member.calls), 1) if step_norm else 1 for member in members], np.float64)


def _grpo(groups: Groups, *, std_normalize: bool = True) -> PerCall:
    return _of_rollouts(groups, lambda members: _group_relative(members, std_normalize))


def _step_wise_grpo(groups: Groups, *, std_normalize: bool = True, step_norm: bool = False) -> PerCall:
    return _of_rollouts(groups, lambda members: _group_relative(members, std_normalize) / _shares(members, step_norm))


def _grpo_batch_std(groups: Groups) -> PerCall:
    centred = [_rewards(members) - _rewards(members).mean() for members in groups]
    together = np.concatenate(centred) if centred else np.zeros(0)
    deviation = math.sqrt(math.fsum(together**2) / max(len(together) - 1, 1))
    return _of_rollouts(groups, lambda members: _group_relative(members, False) / (deviation + SMALL))


def _grpo_global_std(groups: Groups, *, step_norm: bool = False) -> PerCall:
    rewards = np.concatenate([_rewards(members) for members in groups]) if groups else np.zeros(0)
    deviation = _std(rewards) if len(rewards) > 1 else 1.0
    return _of_rollouts(
        groups, lambda members: _group_relative(members, False) / (deviation + SMALL) / _shares(members, step_norm)
    )


def _reward_named(members: Sequence[Member], name: str) -> Array:
    """Return a reward of each member by its name: the member's own, or what workflow or judge measured; NaN without."""
    if name == "reward":
        return _rewards(members)
    places = (name, "judge/" + name, "workflow/" + name)
    return np.array(
        [next((member.metrics[one] for one in places if one in member.metrics), math.nan) for member in members]
    )


def _gdpo(groups: Groups, *, weights: Mapping[str, float] | None = None) -> PerCall:
    """Scale each named reward within its group, add them up, and scale the sums to the deviation that they have over
    the step. A reward that a whole group has alike says nothing."""

    def of_group(members: Sequence[Member]) -> Array:
        scaled = [np.zeros(len(members))]
        for name, weight in (weights or {"reward": 1.0}).items():
            values_G = _reward_named(members, name)
            if not (values_G == values_G[0]).all():
                scaled.append(weight * (values_G - values_G.mean()) / (_std(values_G) + SMALL))
        total_G: Array = np.sum(scaled, axis=0)
        return total_G

    sums = [of_group(members) for members in groups]
    together = np.concatenate(sums) if sums else np.zeros(0)
    deviation = math.sqrt(math.fsum(together**2) / max(len(together) - 1, 1))
    remaining = iter(sums)
    return _of_rollouts(groups, lambda members: next(remaining) / (deviation + SMALL))


def _rloo(groups: Groups) -> PerCall:
    def numbers(members: Sequence[Member]) -> list[float]:
        total = math.fsum(member.reward for member in members)
        return [member.reward - (total - member.reward) / (len(members) - 1) for member in members]

    return _of_rollouts(groups, numbers)


def _maxrl(groups: Groups) -> PerCall:
    def numbers(members: Sequence[Member]) -> list[float]:
        mean = math.fsum(member.reward for member in members) / len(members)
        return [member.reward / mean - 1.0 if mean > 1e-6 else 0.0 for member in members]

    return _of_rollouts(groups, numbers)


def _reinforce(groups: Groups) -> PerCall:
    return _of_rollouts(groups, _rewards)


def _nothing(groups: Groups) -> PerCall:
    return _of_rollouts(groups, lambda members: [0.0] * len(members))


def _remax(groups: Groups) -> PerCall:
    return _of_rollouts(groups, lambda members: [member.reward - member.baseline for member in members])


def _rae(groups: Groups, *, roles: Sequence[str] = (), decay: float = 0.95) -> PerCall:
    """What is left of a reward without the baseline of its role, which `role_baselines` makes from both arguments."""
    return _of_rollouts(groups, lambda members: [member.reward - member.baseline for member in members])


def _reinforceplusplus(groups: Groups) -> PerCall:
    rewards = np.array([member.reward for members in groups for member in members], np.float64)
    if not len(rewards):
        return {}
    mean, deviation = rewards.mean(), _std(rewards)
    return _of_rollouts(groups, lambda members: (_rewards(members) - mean) / (deviation + SMALL))


def _reinforceplusplus_tokens(groups: Groups) -> PerCall:
    """Give every token the reward of its call, centred and scaled over all tokens of the step."""
    calls = [(member, call) for members in groups for member in members for call in member.calls]
    values = np.array([call.own_reward for _, call in calls], np.float64)
    tokens = np.array([call.num_tokens for _, call in calls], np.float64)
    if not len(values):
        return {}
    mean = (values * tokens).sum() / tokens.sum()
    variance = (tokens * (values - mean) ** 2).sum() / max(tokens.sum() - 1.0, 1.0)
    flat = bool((values == values[0]).all())
    return {
        (member.rollout_id, call.index): 0.0 if flat else float((value - mean) / math.sqrt(variance + 1e-8))
        for (member, call), value in zip(calls, values, strict=True)
    }


def _opmd(groups: Groups, *, tau: float | None = None) -> PerCall:
    def numbers(members: Sequence[Member]) -> Array:
        rewards_G = _rewards(members)
        high = float(rewards_G.max())
        soft = 0.0 if tau is None else high + tau * math.log(float(np.exp((rewards_G - high) / tau).mean()))
        above_G: Array = rewards_G - (float(rewards_G.mean()) if tau is None else soft)
        return above_G

    return _of_rollouts(groups, numbers)


def _asymre(groups: Groups, *, baseline_shift: float = -0.1) -> PerCall:
    return _of_rollouts(groups, lambda members: _rewards(members) - (_rewards(members).mean() + baseline_shift))


def _rec(groups: Groups, *, std_normalize: bool = False) -> PerCall:
    def numbers(members: Sequence[Member]) -> Array:
        rewards_G = _rewards(members)
        advantages_G: Array = (rewards_G - rewards_G.mean()) / (rewards_G.std() + SMALL if std_normalize else 1.0)
        return advantages_G

    return _of_rollouts(groups, numbers)


def _best_of_group(groups: Groups) -> PerCall:
    def numbers(members: Sequence[Member]) -> list[float]:
        best = max(member.reward for member in members)
        return [1.0 if member.reward == best else 0.0 for member in members]

    return _of_rollouts(groups, numbers)


def _every_rollout(groups: Groups) -> PerCall:
    return _of_rollouts(groups, lambda members: [1.0] * len(members))


def _pass_at_k(groups: Groups, *, k: int = 4) -> PerCall:
    """Count, of all subsets of k members, the share that contains a right one; and the same share among the subsets
    with a given member (hypergeometric probabilities of drawing no right one)."""

    def none_right(wrong: int, others: int, drawn: int) -> float:
        """Return the probability that `drawn` of `others` are all among the `wrong`."""
        return math.prod((wrong - i) / (others - i) for i in range(drawn)) if wrong >= drawn else 0.0

    def numbers(members: Sequence[Member]) -> list[float]:
        count, wrong = len(members), sum(member.reward <= 0 for member in members)
        mean = 1.0 - none_right(wrong, count, k)
        deviation = math.sqrt(mean * (1.0 - mean))
        if deviation == 0.0:
            return [0.0] * count
        shares = [1.0 if member.reward > 0 else 1.0 - none_right(wrong - 1, count - 1, k - 1) for member in members]
        return [(one - mean) / deviation for one in shares]

    return _of_rollouts(groups, numbers)


def returns_of(member: Member, gamma: float) -> list[float]:
    """Return the discounted sum of rewards from each trained call on."""
    calls = member.calls
    return [
        math.fsum(gamma**later * call.reward_after for later, call in enumerate(calls[place:]))
        for place in range(len(calls))
    ]


def state_of(member: Member, call: CallTerms, across_tasks: bool) -> tuple[str, bool, str]:
    """Return what identifies the state of a call: its group too, unless the workflow reported the state and tasks share
    states."""
    return ("" if across_tasks and call.reported else member.group_id, call.reported, call.state)


def _gigpo(
    groups: Groups, *, omega: float = 1.0, gamma: float = 1.0, std_normalize: bool = False, across_tasks: bool = False
) -> PerCall:
    result: PerCall = {}
    states: dict[tuple[str, bool, str], list[tuple[tuple[str, int], float]]] = {}
    for members in groups:
        episodes_G = np.array([member.episode for member in members], np.float64)
        deviation = _std(episodes_G) + SMALL if std_normalize else 1.0
        for member, of_episode in zip(members, (episodes_G - episodes_G.mean()) / deviation, strict=True):
            for call, value in zip(member.calls, returns_of(member, gamma), strict=True):
                key = (member.rollout_id, call.index)
                result[key] = float(of_episode)
                states.setdefault(state_of(member, call, across_tasks), []).append((key, value))
    for compared in states.values():
        values_C = np.array([value for _, value in compared], np.float64)
        if len(values_C) < 2:
            continue
        deviation = _std(values_C) + SMALL if std_normalize else 1.0
        for (key, _), above in zip(compared, (values_C - values_C.mean()) / deviation, strict=True):
            result[key] += omega * float(above)
    return result


def _step_rewards(groups: Groups, *, gamma: float = 1.0) -> PerCall:
    result: PerCall = {}
    for members in groups:
        values = {
            (member.rollout_id, call.index): value
            for member in members
            for call, value in zip(member.calls, returns_of(member, gamma), strict=True)
        }
        mean = math.fsum(values.values()) / len(values) if values else 0.0
        result |= {key: value - mean for key, value in values.items()}
    return result


def _rewards_after(groups: Groups) -> PerCall:
    """Return the reward after each call's last token, from which the critic's advantages are made."""
    members = itertools.chain.from_iterable(groups)
    return {(member.rollout_id, call.index): call.reward_after for member in members for call in member.calls}


def _own_rewards(groups: Groups) -> PerCall:
    """Like `_rewards_after`, where each call is an episode of its own."""
    members = itertools.chain.from_iterable(groups)
    return {(member.rollout_id, call.index): call.own_reward for member in members for call in member.calls}


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """An advantage. `critic`: the trainer makes the advantages of tokens from these numbers with a critic. `compares`
    names the numbers that a group without spread has in common. `known`: there is a second formula."""

    numbers: Callable[..., PerCall]
    group_relative: bool = True
    centred: bool = False
    baseline: bool = False
    by_role: bool = False
    needs_reward: bool = True
    critic: bool = False
    entropy_clip: bool = False
    token_baseline: bool = False
    compares: str = "rewards"
    known: bool = True


FORMULAS: Mapping[str, Formula] = {
    "grpo": Formula(numbers=_grpo, centred=True),
    "step_wise_grpo": Formula(numbers=_step_wise_grpo, centred=True),
    "clipb": Formula(numbers=_grpo, centred=True, entropy_clip=True),
    "clipv": Formula(numbers=_grpo, centred=True, entropy_clip=True),
    "grpo_batch_std": Formula(numbers=_grpo_batch_std, centred=True),
    "grpo_global_std": Formula(numbers=_grpo_global_std, centred=True),
    "gdpo": Formula(numbers=_gdpo, centred=True, compares="metrics"),
    "rloo": Formula(numbers=_rloo, centred=True),
    "maxrl": Formula(numbers=_maxrl, centred=True),
    "reinforce": Formula(numbers=_reinforce, group_relative=False),
    "none": Formula(numbers=_nothing, group_relative=False, needs_reward=False),
    "remax": Formula(numbers=_remax, group_relative=False, baseline=True),
    "rae": Formula(numbers=_rae, group_relative=False, by_role=True),
    "reinforceplusplus": Formula(numbers=_reinforceplusplus, group_relative=False),
    "reinforceplusplus_tokens": Formula(numbers=_reinforceplusplus_tokens, group_relative=False, compares="calls"),
    "opmd": Formula(numbers=_opmd),
    "asymre": Formula(numbers=_asymre),
    "rec": Formula(numbers=_rec, centred=True),
    "otb": Formula(numbers=_rec, centred=True, token_baseline=True),
    "best_of_group": Formula(numbers=_best_of_group),
    "every_rollout": Formula(numbers=_every_rollout, group_relative=False, needs_reward=False),
    "pass_at_k": Formula(numbers=_pass_at_k),
    "gigpo": Formula(numbers=_gigpo, compares="states"),
    "step_rewards": Formula(numbers=_step_rewards, compares="returns"),
    "gae": Formula(numbers=_rewards_after, group_relative=False, critic=True, compares="episodes"),
    "call_gae": Formula(numbers=_own_rewards, group_relative=False, critic=True, compares="calls"),
}
"""The formulas, by their names in the configuration."""


def spread(members: Sequence[Member], formula: Formula, arguments: Mapping[str, object]) -> float:
    """Return the largest standard deviation among the sets of numbers that an advantage compares within a group."""
    kind = formula.compares
    if kind == "rewards":
        return _std(_rewards(members))
    if kind == "metrics":
        weights = arguments.get("weights")
        names = list(weights) if isinstance(weights, Mapping) and weights else ["reward"]
        return max(_std(_reward_named(members, name)) for name in names)
    if kind == "episodes":
        return _std(np.array([member.episode for member in members], np.float64))
    if kind == "calls":
        return _std(np.array([call.own_reward for member in members for call in member.calls], np.float64))
    gamma = float(str(arguments.get("gamma", 1.0)))
    states: dict[object, list[float]] = {}
    for member in members:
        for call, value in zip(member.calls, returns_of(member, gamma), strict=True):
            key = state_of(member, call, False) if kind == "states" else "all"
            states.setdefault(key, []).append(value)
    deviations = [_std(np.array(values, np.float64)) for values in states.values()]
    episodes = [_std(np.array([member.episode for member in members], np.float64))] if kind == "states" else []
    return max((*deviations, *episodes), default=0.0)
