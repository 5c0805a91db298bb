"""Advantages: numbers worked out by hand, and what no change of a group may alter."""

import dataclasses
import itertools
import math
import statistics
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.learning.algorithm import advantages
from sharpen.learning.algorithm.advantages import ADVANTAGES
from sharpen.learning.algorithm.returns import FloatArray, Scores, std


def grpo(rewards_G: FloatArray, *, std_normalize: bool = True) -> FloatArray:
    """Advantages of the rollouts of one group, one call each."""
    return advantages.grpo(Scores.of_rollouts(rewards_G), std_normalize=std_normalize)


rewards = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=12)


def test_grpo_by_hand() -> None:
    # mean 0.25; deviations 0.75, -0.25, -0.25, -0.25; sum of squares 0.5625 + 3 * 0.0625 = 0.75; / 3 = 0.25; std 0.5
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6)
    np.testing.assert_allclose(grpo(np.array([1.0, 0.0, 0.0, 0.0])), expected, rtol=1e-14)
    np.testing.assert_allclose(grpo(np.array([1.0, 0.0, 0.0, 0.0]), std_normalize=False), [0.75, -0.25, -0.25, -0.25])


def test_step_wise_grpo_by_hand() -> None:
    # rewards 2 and 0: mean 1, unbiased std sqrt((1 + 1) / 1) = sqrt(2); four calls and one
    score = 1.0 / (math.sqrt(2.0) + 1e-6)
    scores = Scores.of_rollouts([2.0, 0.0], num_calls=[4, 1])
    np.testing.assert_allclose(advantages.step_wise_grpo(scores), [score] * 4 + [-score], rtol=1e-14)
    np.testing.assert_allclose(
        advantages.step_wise_grpo(scores, step_norm=True), [score / 4] * 4 + [-score], rtol=1e-14
    )


def test_reward_std_by_hand() -> None:
    assert std(np.array([1.0, 0.0])) == pytest.approx(math.sqrt(0.5))
    assert std(np.array([0.1, 0.1, 0.1])) == 0.0


TWO_GROUPS = Scores.of_rollouts([1.0, 0.0, 4.0, 2.0, 0.0], groups=[0, 0, 1, 1, 1])
# Means 0.5 and 2; deviations 0.5, -0.5, 2, 0, -2; all five: mean 1.4, squares 0.16 + 1.96 + 6.76 + 0.36 + 1.96 = 11.2.
BY_HAND = {
    "grpo_batch_std": [d / (math.sqrt(8.5 / 4) + 1e-6) for d in (0.5, -0.5, 2.0, 0.0, -2.0)],
    "rloo": [1.0, -1.0, 4 - 1.0, 2 - 2.0, 0 - 3.0],
    "maxrl": [1.0, -1.0, 1.0, 0.0, -1.0],
    "reinforce": [1.0, 0.0, 4.0, 2.0, 0.0],
    "reinforceplusplus": [(r - 1.4) / (math.sqrt(11.2 / 4) + 1e-6) for r in (1.0, 0.0, 4.0, 2.0, 0.0)],
    "opmd": [0.5, -0.5, 2.0, 0.0, -2.0],
    "asymre": [0.6, -0.4, 2.1, 0.1, -1.9],
    "rec": [0.5, -0.5, 2.0, 0.0, -2.0],
    "otb": [0.5, -0.5, 2.0, 0.0, -2.0],
    "best_of_group": [1.0, 0.0, 1.0, 0.0, 0.0],
    "every_rollout": [1.0, 1.0, 1.0, 1.0, 1.0],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_advantages_of_two_groups_by_hand(name: str) -> None:
    np.testing.assert_allclose(ADVANTAGES[name].function(TWO_GROUPS), BY_HAND[name], rtol=1e-12, atol=1e-15)


def test_opmd_with_tau_by_hand() -> None:
    # tau log mean exp(r / tau) of 1 and 0 with tau 0.5: 0.5 log((e^2 + 1) / 2)
    soft = 0.5 * math.log((math.exp(2.0) + 1.0) / 2.0)
    np.testing.assert_allclose(advantages.opmd(Scores.of_rollouts([1.0, 0.0]), tau=0.5), [1 - soft, -soft])


def test_maxrl_is_what_another_team_computes() -> None:
    """Rewards and advantages of `test_max_rl_mean_normalized` in prime-rl's `tests/unit/orchestrator/test_advantage.py`
    (559b447); one right rollout of four weighs 1 / (1 / 4) - 1."""
    groups = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    expected = [[3.0, -1.0, -1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    for rewards_G, advantages_G in zip(groups, expected, strict=True):
        assert advantages.maxrl(Scores.of_rollouts(rewards_G)).tolist() == advantages_G


def test_maxrl_of_a_group_with_nothing_right_is_zero() -> None:
    """Also where over-long answers were punished, so that the mean is below 0; and where only rounding is above it."""
    for rewards_G in ([0.0, -0.5], [0.1, 0.2, -0.3], [0.0, 0.0]):
        assert not advantages.maxrl(Scores.of_rollouts(rewards_G)).any()


def named(groups: list[int], **metrics: list[float]) -> Scores:
    """A step whose rollouts have these metrics, and a reward of 0."""
    of_rollouts = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    scores = Scores.of_rollouts([0.0] * len(groups), groups)
    return dataclasses.replace(scores, metrics_R=np.array(of_rollouts, np.object_))


def test_gdpo_by_hand() -> None:
    # Two groups of two. right 1, 0 | 0, 1: +-0.5 / sqrt(0.5) = +-0.7071; form 0, 1 | 0, 1: the same, and half of it.
    # Sums 0.3536, -0.3536, -1.0607, 1.0607; squares 0.125, 0.125, 1.125, 1.125: std sqrt(2.5 / 3) = 0.9129.
    scores = named([0, 0, 1, 1], right=[1.0, 0.0, 0.0, 1.0], form=[0.0, 1.0, 0.0, 1.0])
    sums = np.array([1.0, -1.0, -3.0, 3.0]) * math.sqrt(0.125)
    expected = sums / math.sqrt(2.5 / 3)
    np.testing.assert_allclose(advantages.gdpo(scores, weights={"right": 1.0, "form": 0.5}), expected, rtol=1e-5)


def test_gdpo_is_what_other_teams_compute() -> None:
    """TRL 1.16.0: its own lines for `multi_objective_aggregation="normalize_then_sum"`, run on these rewards with
    weights 1 and 0.5 (it adds 1e-4 to a deviation, we 1e-6). verl: the rewards of
    `test_gdpo_normalizes_each_reward_dimension_before_sum`, which claims 0, 0, less and more than 0."""
    scores = named([0] * 4 + [1] * 4, a=[1, 0, 1, 0, 0, 0, 1, 0], b=[0.25, 0.75, 1, 0, 1, 0.5, 0, 0])
    found = advantages.gdpo(scores, weights={"a": 1.0, "b": 0.5})
    expected = [0.597182, -0.597182, 1.425673, -1.425673, 0.154073, -0.372556, 1.117667, -0.899184]
    np.testing.assert_allclose(found, expected, atol=4e-4)
    scores = named([0, 0, 1, 1], accuracy=[1.0, 0.0, 0.0, 1.0], form=[0.0, 1.0, 0.0, 1.0])
    found = advantages.gdpo(scores, weights={"accuracy": 1.0, "form": 1.0})
    np.testing.assert_allclose(found, [0.0, 0.0, -math.sqrt(1.5), math.sqrt(1.5)], atol=1e-5)


def test_gdpo_finds_a_judges_metrics_and_the_reward_by_name() -> None:
    scores = named([0, 0], **{"judge/right": [1.0, 0.0]})
    expected = advantages.gdpo(Scores.of_rollouts([1.0, 0.0]))
    for name in ("right", "judge/right"):
        np.testing.assert_array_equal(advantages.gdpo(scores, weights={name: 1.0}), expected)
    rewarded = dataclasses.replace(scores, rewards_R=np.array([0.0, 1.0]))
    np.testing.assert_array_equal(advantages.gdpo(rewarded, weights={"reward": 1.0}), -expected)


def test_gdpo_refuses_a_rollout_without_a_named_reward() -> None:
    with pytest.raises(ValueError, match=r"a rollout has no metric 'form' \(it has right\)"):
        advantages.gdpo(named([0, 0], right=[1.0, 0.0]), weights={"right": 1.0, "form": 1.0})


@given(st.lists(st.tuples(rewards, rewards), min_size=1, max_size=3), st.sampled_from([0.5, 4.0]), st.floats(-9, 9))
def test_gdpo_sees_neither_shift_nor_scale_of_one_of_several_rewards(
    groups: list[tuple[list[float], list[float]]], scale: float, shift: float
) -> None:
    pairs = [(n, x, y) for n, (a, b) in enumerate(groups) for x, y in zip(a, b, strict=False)]
    numbers, first, second = ([*column] for column in zip(*pairs, strict=True))
    weights = {"a": 1.0, "b": 0.5}
    found = advantages.gdpo(named(numbers, a=first, b=second), weights=weights)
    moved = advantages.gdpo(
        named(numbers, a=first, b=[scale * round(y * 8) / 8 + round(shift) for y in second]), weights=weights
    )
    np.testing.assert_allclose(moved, found, atol=1e-3)
    np.testing.assert_allclose(np.bincount(numbers, found), 0.0, atol=1e-9)


def test_rec_with_the_population_std_by_hand() -> None:
    # rewards 1 and 0: population std 0.5
    expected = np.array([0.5, -0.5]) / (0.5 + 1e-6)
    np.testing.assert_allclose(advantages.rec(Scores.of_rollouts([1.0, 0.0]), std_normalize=True), expected, rtol=1e-9)


def test_pass_at_k_by_hand() -> None:
    # n 4, one right, k 2: m = 1 - C(3,2)/C(4,2) = 0.5, s = 0.5; right: 1; wrong: (0.5 - C(2,1)/C(3,1)) / 0.5 = -1/3
    found = advantages.pass_at_k(Scores.of_rollouts([1.0, 0.0, 0.0, 0.0]), k=2)
    np.testing.assert_allclose(found, [1.0, -1 / 3, -1 / 3, -1 / 3])
    assert (advantages.pass_at_k(Scores.of_rollouts([1.0, 1.0, 1.0, 0.0]), k=2) == 0.0).all()  # every pair has one
    with pytest.raises(ValueError, match="at least 3"):
        advantages.pass_at_k(Scores.of_rollouts([1.0, 0.0]), k=3)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_pass_at_k_is_the_mean_over_all_subsets(right: int, wrong: int, k: int) -> None:
    """A rollout's advantage is the mean, over the subsets that hold it, of (subset's reward - m) / s."""
    rewards_G = [1.0] * right + [0.0] * wrong
    if k > len(rewards_G):
        return
    subsets = list(itertools.combinations(range(len(rewards_G)), k))
    values = [max(rewards_G[i] for i in subset) for subset in subsets]
    mean, deviation = float(np.mean(values)), float(np.std(values))
    if deviation == 0:
        return
    expected = [
        np.mean([value - mean for subset, value in zip(subsets, values, strict=True) if i in subset]) / deviation
        for i in range(len(rewards_G))
    ]
    np.testing.assert_allclose(advantages.pass_at_k(Scores.of_rollouts(rewards_G), k=k), expected, atol=1e-9)


def two_rollouts(states: list[int], step_rewards: list[float] | None = None) -> Scores:
    """Rewards 1 and 0, two calls each; episodes' returns are the sums of rewards of steps where they are given."""
    scores = dataclasses.replace(Scores.of_rollouts([1.0, 0.0], num_calls=[2, 2]), states_C=np.array(states))
    if step_rewards is None:
        return scores
    returns_R = np.array(step_rewards).reshape(2, 2).sum(axis=1)
    return dataclasses.replace(scores, step_rewards_C=np.array(step_rewards), returns_R=returns_R)


def test_gigpo_by_hand() -> None:
    # Without rewards of steps: returns 1, 1 and 0, 0. All first calls share a state (mean 0.5), the second ones do not.
    found = advantages.gigpo(two_rollouts([0, 1, 0, 2]), omega=0.5)
    np.testing.assert_allclose(found, [0.5 + 0.25, 0.5, -0.5 - 0.25, -0.5])
    # With them: episodes 1.5 and 0.2 (mean 0.85); returns 0.5 + 0.9 * 1 = 1.4, 1 and 0 + 0.9 * 0.2 = 0.18, 0.2; second
    # calls share a state (mean 0.6).
    found = advantages.gigpo(two_rollouts([0, 1, 2, 1], [0.5, 1.0, 0.0, 0.2]), gamma=0.9)
    np.testing.assert_allclose(found, [0.65, 0.65 + 0.4, -0.65, -0.65 - 0.4])


def test_states_of_different_groups_are_not_compared() -> None:
    scores = Scores.of_rollouts([1.0, 0.0, 1.0, 0.0], groups=[0, 0, 1, 1])
    scores = dataclasses.replace(scores, states_C=np.array([0, 1, 0, 1]))
    np.testing.assert_allclose(advantages.gigpo(scores), [0.5, -0.5, 0.5, -0.5])


def test_step_rewards_by_hand() -> None:
    # Returns 1.5, 1, 0.2, 0.2: mean 0.725
    found = advantages.step_rewards(two_rollouts([0, 1, 2, 3], [0.5, 1.0, 0.0, 0.2]))
    np.testing.assert_allclose(found, [0.775, 0.275, -0.525, -0.525])


def plain(name: str, rewards_of_groups: list[list[float]]) -> list[float]:
    """The same by loops over plain lists, written without the module."""
    everything = [r for group in rewards_of_groups for r in group]
    result = []
    for group in rewards_of_groups:
        for place, r in enumerate(group):
            others = group[:place] + group[place + 1 :]
            d = r - statistics.fmean(group)
            match name:
                case "grpo" | "step_wise_grpo" | "clipb" | "clipv":  # of calls; tokens are looked at later
                    result.append(d / (statistics.stdev(group) + 1e-6))
                case "grpo_batch_std":
                    deviations = [x - statistics.fmean(g) for g in rewards_of_groups for x in g]
                    result.append(d / (math.sqrt(sum(x * x for x in deviations) / (len(deviations) - 1)) + 1e-6))
                case "grpo_global_std":
                    result.append(d / (statistics.stdev(everything) + 1e-6))
                case "maxrl":
                    mean = statistics.fmean(group)
                    result.append(d / mean if mean > 1e-6 else 0.0)
                case "gdpo":  # of the reward alone
                    scaled = [
                        (x - statistics.fmean(g)) / (statistics.stdev(g) + 1e-6) for g in rewards_of_groups for x in g
                    ]
                    deviation = math.sqrt(sum(x * x for x in scaled) / (len(scaled) - 1))
                    result.append(d / (statistics.stdev(group) + 1e-6) / (deviation + 1e-6))
                case "rloo":
                    result.append(r - statistics.fmean(others))
                case "reinforceplusplus":
                    result.append((r - statistics.fmean(everything)) / (statistics.stdev(everything) + 1e-6))
                case "asymre":
                    result.append(d + 0.1)
                case "reinforceplusplus_tokens":  # of one token each
                    result.append(
                        (r - statistics.fmean(everything)) / math.sqrt(statistics.variance(everything) + 1e-8)
                    )
                case "reinforce" | "gae" | "call_gae":  # the rewards that GAE begins with
                    result.append(r)
                case "none":
                    result.append(0.0)
                case "best_of_group":
                    result.append(float(r == max(group)))
                case "every_rollout":
                    result.append(1.0)
                case _:
                    result.append(d)
    return result


GROUPS = st.lists(st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=2, max_size=5), min_size=1, max_size=4)
PLAIN = sorted(set(ADVANTAGES) - {"pass_at_k", "gigpo", "step_rewards", "remax", "rae"})


@pytest.mark.parametrize("name", PLAIN)
@given(groups=GROUPS)
def test_advantages_equal_a_plain_implementation(name: str, groups: list[list[float]]) -> None:
    rewards_R = [r for group in groups for r in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    found = ADVANTAGES[name].function(Scores.of_rollouts(rewards_R, numbers))
    np.testing.assert_allclose(found, plain(name, groups), atol=1e-6)


@pytest.mark.parametrize("name", sorted(name for name, one in ADVANTAGES.items() if one.centred))
@given(groups=GROUPS)
def test_trap_16_centred_advantages_have_zero_mean_in_every_group(name: str, groups: list[list[float]]) -> None:
    """Red when `_centred` takes the mean over all groups."""
    numbers = np.array([number for number, group in enumerate(groups) for _ in group])
    found = ADVANTAGES[name].function(Scores.of_rollouts([r for group in groups for r in group], numbers))
    np.testing.assert_allclose(np.bincount(numbers, found), 0.0, atol=1e-6)


def test_remax_by_hand() -> None:
    # Greedy rewards 0.5 and 1 for the two tasks; the second rollout of the first made two calls.
    scores = dataclasses.replace(
        Scores.of_rollouts([1.0, 0.0, 1.0], [0, 0, 1], num_calls=[1, 2, 1]), baselines_R=np.array([0.5, 0.5, 1.0])
    )
    assert advantages.remax(scores).tolist() == [0.5, -0.5, -0.5, 0.0]
    with pytest.raises(ValueError, match="greedy rollout"):
        advantages.remax(Scores.of_rollouts([1.0]))
    with pytest.raises(ValueError, match="finite"):
        advantages.remax(dataclasses.replace(scores, baselines_R=np.array([0.5, 0.5, np.nan])))


@given(GROUPS, st.floats(-10, 10), st.randoms(use_true_random=False))
def test_remax_does_not_see_a_shift_of_all_rewards_nor_the_order(
    groups: list[list[float]], shift: float, random
) -> None:
    rewards = [(r, number, group[0]) for number, group in enumerate(groups) for r in group]  # any baseline will do
    order = list(range(len(rewards)))
    random.shuffle(order)

    def found(rows: list[tuple[float, int, float]], by: float) -> np.ndarray:
        of, numbers, baselines = (list(column) for column in zip(*rows, strict=True))
        scores = Scores.of_rollouts(np.array(of) + by, numbers)
        return advantages.remax(dataclasses.replace(scores, baselines_R=np.array(baselines) + by))

    expected = [r - baseline for r, _, baseline in rewards]
    np.testing.assert_allclose(found(rewards, shift), expected, atol=1e-9)
    np.testing.assert_allclose(found([rewards[place] for place in order], 0.0), np.array(expected)[order], atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"remax", "rae"}))
@given(order=st.permutations(range(6)))
def test_permuting_the_rollouts_of_a_step_permutes_their_advantages(name: str, order: list[int]) -> None:
    rewards_R = np.array([1.0, 0.0, 0.5, 0.25, 1.0, 0.0])
    groups_R = np.array([0, 0, 0, 0, 1, 1]) if name != "pass_at_k" else np.zeros(6, np.int64)
    function = ADVANTAGES[name].function
    found = function(Scores.of_rollouts(rewards_R, groups_R))
    np.testing.assert_allclose(
        function(Scores.of_rollouts(rewards_R[order], groups_R[order])), found[order], atol=1e-12
    )


@given(st.floats(-1e3, 1e3), st.integers(2, 9))
def test_equal_rewards_have_advantages_of_exactly_zero(reward: float, size: int) -> None:
    assert (grpo(np.full(size, reward)) == 0.0).all()


@given(rewards)
def test_trap_16_advantages_of_a_group_have_zero_mean(values: list[float]) -> None:
    """Red when `_centred` subtracts nothing (or another group's mean)."""
    rewards_G = np.array(values)
    for normalize in (True, False):
        assert grpo(rewards_G, std_normalize=normalize).sum() == pytest.approx(0.0, abs=1e-9)


def test_trap_16_a_lone_rollout_has_no_advantage() -> None:
    """Red when `_centred` lets one reward through: the spec's engine scores it with mean 0, std 1."""
    with pytest.raises(ValueError, match="at least two scored rollouts"):
        grpo(np.array([1.0]))


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        grpo(np.array([1.0, float("nan")]))


@given(rewards, st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_advantages(values: list[float], random: Random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    rewards_G = np.array(values)
    np.testing.assert_allclose(grpo(rewards_G[order]), grpo(rewards_G)[order], atol=1e-9)


@given(rewards, st.integers(-64, 64))
def test_shifting_rewards_changes_nothing(values: list[float], shift: int) -> None:
    rewards_G = np.array(values)
    np.testing.assert_allclose(grpo(rewards_G + shift), grpo(rewards_G), atol=1e-9)


@given(rewards, st.floats(0.5, 100.0))
def test_scaling_rewards_changes_nothing_when_normalized_and_scales_otherwise(
    values: list[float], scale: float
) -> None:
    rewards_G = np.array(values)
    np.testing.assert_allclose(grpo(rewards_G * scale), grpo(rewards_G), atol=2e-4)  # up to the epsilon
    plain = grpo(rewards_G, std_normalize=False)
    np.testing.assert_allclose(grpo(rewards_G * scale, std_normalize=False), plain * scale, atol=1e-9)


@given(rewards)
def test_duplicating_a_group_keeps_its_centred_advantages(values: list[float]) -> None:
    rewards_G = np.array(values)
    twice = grpo(np.concatenate([rewards_G, rewards_G]), std_normalize=False)
    np.testing.assert_allclose(twice, np.tile(grpo(rewards_G, std_normalize=False), 2), atol=1e-9)
