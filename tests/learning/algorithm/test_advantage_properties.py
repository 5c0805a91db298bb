"""What each advantage claims: equal to a plain implementation with every parameter, blind to what it should not see."""

import dataclasses
import math
import statistics
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.learning.algorithm import advantages
from sharpen.learning.algorithm.advantages import ADVANTAGES
from sharpen.learning.algorithm.returns import FloatArray, Scores, discounted_returns, std

EIGHTHS = st.integers(-16, 16).map(lambda n: n / 8)  # exact in floating point, so that equal rewards are equal
GROUPS = st.lists(st.lists(EIGHTHS, min_size=4, max_size=6), min_size=1, max_size=4)
NAN = float("nan")


def step(groups: list[list[float]]) -> Scores:
    """A step of these groups, one call for each rollout; the baseline of a group is its first reward."""
    return dataclasses.replace(
        Scores.of_rollouts(
            [r for group in groups for r in group], [n for n, group in enumerate(groups) for _ in group]
        ),
        baselines_R=np.array([group[0] for group in groups for _ in group]),
    )


def found(name: str, groups: list[list[float]]) -> FloatArray:
    result: FloatArray = ADVANTAGES[name].function(step(groups))
    return result


OF_A_GROUP = [
    "grpo",
    "step_wise_grpo",
    "rloo",
    "remax",
    "rae",
    "opmd",
    "asymre",
    "rec",
    "otb",
    "best_of_group",
    "pass_at_k",
    "gigpo",
    "step_rewards",
    "maxrl",
]
OF_THE_STEP = ["grpo_batch_std", "gdpo", "reinforceplusplus", "reinforceplusplus_tokens"]
SCALES = {
    **dict.fromkeys(["reinforce", "remax", "rae", "rloo", "opmd", "rec", "otb", "gigpo", "step_rewards"], 1),
    **dict.fromkeys(["grpo", "step_wise_grpo", "best_of_group", "pass_at_k", "maxrl", *OF_THE_STEP], 0),
}


@pytest.mark.parametrize("name", OF_A_GROUP)
@given(GROUPS)
def test_a_groups_advantages_are_those_of_the_group_alone(name: str, groups: list[list[float]]) -> None:
    apart = np.concatenate([found(name, [group]) for group in groups])
    np.testing.assert_allclose(found(name, groups), apart, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in OF_A_GROUP if name not in ("pass_at_k", "maxrl")])
@given(groups=GROUPS, shifts=st.lists(EIGHTHS, min_size=4, max_size=4))
def test_a_shift_of_a_groups_rewards_is_not_seen(name: str, groups: list[list[float]], shifts: list[float]) -> None:
    moved = [[r + shift for r in group] for group, shift in zip(groups, shifts, strict=False)]
    np.testing.assert_allclose(found(name, moved), found(name, groups), atol=1e-9)


@pytest.mark.parametrize("name", OF_THE_STEP)
@given(groups=GROUPS, shift=EIGHTHS)
def test_a_shift_of_all_rewards_is_not_seen(name: str, groups: list[list[float]], shift: float) -> None:
    moved = [[r + shift for r in group] for group in groups]
    np.testing.assert_allclose(found(name, moved), found(name, groups), atol=1e-9)


@pytest.mark.parametrize("name", sorted(SCALES))
@given(groups=GROUPS, scale=st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_a_scale_of_all_rewards_scales_or_is_not_seen(name: str, groups: list[list[float]], scale: float) -> None:
    scaled = found(name, [[r * scale for r in group] for group in groups])
    # Rewards differ by 1/8 or not at all: a deviation is at least 0.05, of which the epsilon is 2e-5, 4 times that
    # after scaling by 1/4, in scores of at most 5.
    np.testing.assert_allclose(scaled, found(name, groups) * scale ** SCALES[name], atol=1e-3)


@pytest.mark.parametrize(
    "name", ["reinforce", "remax", "rae", "opmd", "asymre", "rec", "best_of_group", "gigpo", "maxrl"]
)
@given(GROUPS)
def test_each_rollout_twice_changes_no_advantage(name: str, groups: list[list[float]]) -> None:
    """Means of a group do not change (deviations with n - 1 do)."""
    twice = found(name, [group + group for group in groups])
    expected = np.concatenate([np.tile(found(name, [group]), 2) for group in groups])
    np.testing.assert_allclose(twice, expected, atol=1e-9)


@given(GROUPS)
def test_a_population_deviation_does_not_see_how_often(groups: list[list[float]]) -> None:
    once, twice = step(groups), step([group + group for group in groups])
    by_group = np.split(advantages.rec(once, std_normalize=True), np.cumsum([len(group) for group in groups])[:-1])
    expected = np.concatenate([np.tile(of_group, 2) for of_group in by_group])
    np.testing.assert_allclose(advantages.rec(twice, std_normalize=True), expected, atol=1e-9)


@pytest.mark.parametrize("name", [*OF_A_GROUP, *OF_THE_STEP])
@given(reward=st.floats(-100.0, 100.0), size=st.integers(4, 8))
def test_without_spread_there_is_no_gradient_unless_the_algorithm_says_so(name: str, reward: float, size: int) -> None:
    expected = {"asymre": 0.1, "best_of_group": 1.0}.get(name, 0.0)
    assert (found(name, [[reward] * size]) == expected).all()


@given(GROUPS)
def test_pass_at_k_adds_up_to_zero_in_every_group_and_prefers_what_is_right(groups: list[list[float]]) -> None:
    places = np.cumsum([0, *(len(group) for group in groups)])
    of_all = found("pass_at_k", groups)
    for group, start in zip(groups, places, strict=False):
        of_group = of_all[start : start + len(group)]
        assert of_group.sum() == pytest.approx(0.0, abs=1e-9)
        right = np.array(group) > 0
        if of_group.any():
            assert of_group[right].min() > of_group[~right].max()


def plain_opmd(group: list[float], tau: float) -> list[float]:
    return [r - tau * math.log(statistics.fmean(math.exp(x / tau) for x in group)) for r in group]


@given(GROUPS, st.floats(0.1, 10.0))
def test_opmd_with_tau_equals_a_plain_implementation(groups: list[list[float]], tau: float) -> None:
    expected = [advantage for group in groups for advantage in plain_opmd(group, tau)]
    np.testing.assert_allclose(advantages.opmd(step(groups), tau=tau), expected, atol=1e-9)


@given(GROUPS)
def test_opmds_soft_maximum_goes_from_the_mean_to_the_maximum(groups: list[list[float]]) -> None:
    np.testing.assert_allclose(advantages.opmd(step(groups), tau=1e6), advantages.opmd(step(groups)), atol=1e-4)
    below = [r - max(group) for group in groups for r in group]
    np.testing.assert_allclose(advantages.opmd(step(groups), tau=1e-4), below, atol=1e-3)


@given(GROUPS, st.floats(-1.0, 1.0))
def test_asymre_and_rec_equal_a_plain_implementation(groups: list[list[float]], shift: float) -> None:
    centred = [r - statistics.fmean(group) for group in groups for r in group]
    np.testing.assert_allclose(
        advantages.asymre(step(groups), baseline_shift=shift), np.array(centred) - shift, atol=1e-12
    )
    normalized = [(r - statistics.fmean(g)) / (statistics.pstdev(g) + 1e-6) for g in groups for r in g]
    np.testing.assert_allclose(advantages.rec(step(groups), std_normalize=True), normalized, atol=1e-6)


def test_asymre_with_another_shift_by_hand() -> None:
    # mean 0.5; 1 - (0.5 + 0.25) and 0 - 0.75
    assert advantages.asymre(Scores.of_rollouts([1.0, 0.0]), baseline_shift=0.25).tolist() == [0.25, -0.75]


def test_gigpo_with_deviations_by_hand() -> None:
    # Rewards 2, 0: score 1 / sqrt(2). Returns without rewards of calls: 2, 2 and 0, 0. The first calls share a state.
    scores = Scores.of_rollouts([2.0, 0.0], num_calls=[2, 2])
    scores = dataclasses.replace(scores, states_C=np.array([7, 1, 7, 2]))
    score = 1.0 / (math.sqrt(2.0) + 1e-6)
    found_C = advantages.gigpo(scores, omega=0.5, std_normalize=True)
    np.testing.assert_allclose(found_C, [1.5 * score, score, -1.5 * score, -score], rtol=1e-12)


def test_discounted_rewards_of_steps_by_hand() -> None:
    # gamma 0.5, rewards 1, 0, 2: 1 + 0.5 * (0 + 0.5 * 2) = 1.5, 1, 2; a rollout without: 0.25, 0.5, 1 of reward 1
    scores = Scores.of_rollouts([9.0, 1.0], num_calls=[3, 3])
    scores = dataclasses.replace(scores, step_rewards_C=np.array([1.0, 0.0, 2.0, NAN, NAN, NAN]))
    assert discounted_returns(scores, 0.5).tolist() == [1.5, 1.0, 2.0, 0.25, 0.5, 1.0]
    # step_rewards takes the mean of all six, 6.25 / 6, away
    expected = np.array([1.5, 1.0, 2.0, 0.25, 0.5, 1.0]) - 6.25 / 6
    np.testing.assert_allclose(advantages.step_rewards(scores, gamma=0.5), expected, atol=1e-12)


CALL = st.tuples(st.one_of(st.none(), EIGHTHS), st.integers(0, 3))  # the reward of its step, its state
ROLLOUT = st.tuples(EIGHTHS, st.lists(CALL, min_size=1, max_size=4))
AGENTS = st.lists(st.lists(ROLLOUT, min_size=2, max_size=4), min_size=1, max_size=3)
Rollouts = list[list[tuple[float, list[tuple[float | None, int]]]]]


def agents(groups: Rollouts) -> Scores:
    rollouts = [(number, *rollout) for number, group in enumerate(groups) for rollout in group]
    calls = [call for _, _, of_rollout in rollouts for call in of_rollout]
    of_steps = [[NAN if all(own is None for own, _ in c) else reward or 0.0 for reward, _ in c] for _, _, c in rollouts]
    return dataclasses.replace(
        Scores.of_rollouts([r for _, r, _ in rollouts], [n for n, _, _ in rollouts], [len(c) for _, _, c in rollouts]),
        returns_R=np.array([plain_returns(r, c, 1.0)[0] for _, r, c in rollouts]),
        step_rewards_C=np.array([reward for of_rollout in of_steps for reward in of_rollout]),
        states_C=np.array([state for _, state in calls]),
    )


def plain_returns(reward: float, calls: list[tuple[float | None, int]], gamma: float) -> list[float]:
    given_rewards = [own for own, _ in calls]
    if all(own is None for own in given_rewards):
        given_rewards[-1] = reward
    return [sum(gamma ** (k - t) * (given_rewards[k] or 0.0) for k in range(t, len(calls))) for t in range(len(calls))]


def plain_gigpo(groups: Rollouts, omega: float, gamma: float) -> list[float]:
    result = []
    for group in groups:
        returns = [plain_returns(reward, calls, gamma) for reward, calls in group]
        episodes = [plain_returns(reward, calls, 1.0)[0] for reward, calls in group]
        for number, (_, calls) in enumerate(group):
            episode = episodes[number] - statistics.fmean(episodes)
            for place, (_, state) in enumerate(calls):
                same = [
                    returns[i][j]
                    for i, (_, others) in enumerate(group)
                    for j, (_, s) in enumerate(others)
                    if s == state
                ]
                result.append(episode + omega * (returns[number][place] - statistics.fmean(same)))
    return result


@given(AGENTS, st.floats(0.0, 2.0), st.floats(0.0, 1.0))
def test_gigpo_and_step_rewards_equal_a_plain_implementation(groups: Rollouts, omega: float, gamma: float) -> None:
    scores = agents(groups)
    expected = plain_gigpo(groups, omega, gamma)
    np.testing.assert_allclose(advantages.gigpo(scores, omega=omega, gamma=gamma), expected, atol=1e-9)
    returns = [[plain_returns(reward, calls, gamma) for reward, calls in group] for group in groups]
    centred = [
        one - statistics.fmean(x for of_rollout in group for x in of_rollout)
        for group in returns
        for of_rollout in group
        for one in of_rollout
    ]
    np.testing.assert_allclose(advantages.step_rewards(scores, gamma=gamma), centred, atol=1e-9)


@settings(max_examples=50)
@given(AGENTS, st.randoms(use_true_random=False))
def test_the_order_of_rollouts_and_the_names_of_states_do_not_matter(groups: Rollouts, random: Random) -> None:
    renamed = [[(reward, [(own, 3 - state) for own, state in calls]) for reward, calls in group] for group in groups]
    orders = [random.sample(range(len(group)), len(group)) for group in groups]
    shuffled = [[group[place] for place in order] for group, order in zip(renamed, orders, strict=True)]
    for name in ("gigpo", "step_rewards", "step_wise_grpo"):
        places, start = [], 0
        for group, order in zip(groups, orders, strict=True):
            starts = np.cumsum([start, *(len(calls) for _, calls in group)])
            places += [n for place in order for n in range(starts[place], starts[place + 1])]
            start = int(starts[-1])
        before, after = (ADVANTAGES[name].function(agents(which)) for which in (groups, shuffled))
        np.testing.assert_allclose(after, before[places], atol=1e-9)


@given(AGENTS)
def test_step_norm_makes_the_calls_of_each_rollout_add_up_to_its_score(groups: Rollouts) -> None:
    """Trap 17's other half: however many calls a rollout has, its advantages add up to the same."""
    scores = agents(groups)
    per_call = advantages.step_wise_grpo(scores, step_norm=True)
    of_rollouts = advantages.grpo(step_of(groups))
    np.testing.assert_allclose(np.bincount(scores.rollouts_C, per_call), of_rollouts, atol=1e-9)


def step_of(groups: Rollouts) -> Scores:
    """The same rollouts with one call each."""
    return step([[reward for reward, _ in group] for group in groups])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_the_spread_of_rewards_is_zero_exactly_where_all_are_the_same(rewards: list[float]) -> None:
    """Differences below 1e-150 count as none (their squares are no floating point numbers)."""
    spread = max(rewards) - min(rewards)
    assert (std(np.array(rewards)) == 0.0) == (spread == 0.0) or spread < 1e-150
    if len(rewards) > 1:
        assert std(np.array(rewards)) == pytest.approx(statistics.stdev(rewards), rel=1e-6, abs=1e-6)
