"""Over-long shaping and reward filters: numbers by hand, properties, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from experience_builders import make_call, make_group, make_rollout, two_turns
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import LossConfig, SamplingConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.shaping import Shaping, length_penalty, was_truncated
from sharpen.learning.experience.draw import make_batch
from sharpen.types import CallStatus, Outcome, Rollout, Sampling


def rollout_of(*lengths: int, **changes: object) -> Rollout:
    """One call for each length."""
    calls = [make_call(index, [1], [2] * length) for index, length in enumerate(lengths)]
    return make_rollout(calls, **changes)  # type: ignore[arg-type]


def test_the_penalty_by_hand() -> None:
    """DAPO's own lengths: 16384 tokens expected, a cache of 4096 up to 20480."""
    penalties = [length_penalty(n, max_length=20480, cache=4096) for n in (0, 16384, 17408, 18432, 20480, 30000)]
    assert penalties == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert [length_penalty(n, max_length=10, cache=4) for n in (6, 7, 9, 10, 11)] == [0.0, -0.25, -0.75, -1.0, -1.0]


def test_penalties_on_length_and_turns_by_hand() -> None:
    """Mean reward 0.75 of 1, 1, 1, 0; tokens 10, 20, 40, 40 in 1, 2, 4, 1 calls."""
    group = [rollout_of(10, reward=1.0), rollout_of(10, 10, reward=1.0), rollout_of(10, 10, 10, 10, reward=1.0)]
    group.append(rollout_of(40, reward=0.0))
    rewards = [one.reward for one in Shaping(length=0.2, turns=0.4).shaped_group(group)]
    expected = [1 - 0.75 * (0.05 + 0.1), 1 - 0.75 * (0.1 + 0.2), 1 - 0.75 * (0.2 + 0.4), -0.75 * (0.2 + 0.1)]
    assert rewards == pytest.approx(expected)
    below = [rollout_of(10, reward=-1.0), rollout_of(20, reward=0.0)]
    assert [one.reward for one in Shaping(length=0.2).shaped_group(below)] == [-1.0, 0.0]


def test_penalties_on_length_and_turns_are_prime_rls() -> None:
    """Groups of `test_linear_completion_term_penalizes_longer` and `test_linear_turns_term_penalizes_more_turns` in
    prime-rl's `tests/unit/orchestrator/test_advantage.py` (559b447), with the numbers of its formula."""
    by_length = Shaping(length=0.25).shaped_group([rollout_of(n, reward=1.0) for n in (10, 20, 30)])
    assert centred(by_length) == pytest.approx([0.25 / 3, 0.0, -0.25 / 3])
    by_turns = Shaping(turns=0.25).shaped_group([rollout_of(100, reward=1.0), rollout_of(*[25] * 4, reward=1.0)])
    assert centred(by_turns) == pytest.approx([0.25 * 0.375, -0.25 * 0.375])
    alike = Shaping(length=0.1, turns=0.1).shaped_group([rollout_of(5, 5, reward=r) for r in (1.0, 0.0, 1.0)])
    assert centred(alike) == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def centred(rollouts: list[Rollout]) -> list[float]:
    rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
    return list(rewards - rewards.mean())


lengths = st.integers(min_value=0, max_value=200)


@given(num_tokens=lengths, more=lengths, max_length=st.integers(1, 150), share=st.floats(0.01, 1.0))
def test_the_penalty_never_rises_with_length_and_stays_within_0_and_1(
    num_tokens: int, more: int, max_length: int, share: float
) -> None:
    cache = max(1, int(max_length * share))
    short = length_penalty(num_tokens, max_length=max_length, cache=cache)
    long = length_penalty(num_tokens + more, max_length=max_length, cache=cache)
    assert -1.0 <= long <= short <= 0.0
    assert (short == 0.0) == (num_tokens <= max_length - cache)
    assert (short == -1.0) == (num_tokens >= max_length)
    # The paper's three cases.
    if num_tokens <= max_length - cache:
        expected = 0.0
    elif num_tokens <= max_length:
        expected = (max_length - cache - num_tokens) / cache
    else:
        expected = -1.0
    assert short == pytest.approx(expected)


def test_a_rollout_is_punished_for_its_longest_trained_call() -> None:
    """Red when `shaped` adds the calls' penalties up, or looks at calls that are not trained."""
    shaping = Shaping(max_length=10, cache=4, penalty=2.0)
    assert shaping.shaped(rollout_of(7, 9, 8, reward=1.0)).reward == 1.0 - 2.0 * 0.75
    assert shaping.shaped(rollout_of(6, 2, reward=0.5)).reward == 0.5
    not_trained = [
        make_call(0, [1], [2] * 10, status=CallStatus.ABANDONED),
        make_call(1, [1], [2] * 10, status=CallStatus.LEFT_OUT),
        make_call(2, [1], [2] * 10, sampling=Sampling(temperature=0.0)),
    ]
    assert shaping.shaped(make_rollout(not_trained, 1.0)).reward == 1.0
    assert shaping.shaped(make_rollout([], 1.0)).reward == 1.0


def test_rewards_of_single_calls_are_each_punished_for_their_call() -> None:
    recorded = rollout_of(8, 2, 10, reward=0.5, call_rewards={0: 1.0, 1: 1.0, 2: 0.5})
    shaped = Shaping(max_length=10, cache=4).shaped(recorded)
    assert shaped.call_rewards == {0: 0.5, 1: 1.0, 2: -0.5}
    assert shaped.reward == -0.5
    assert (recorded.reward, recorded.call_rewards[0]) == (0.5, 1.0)  # the record stays


def test_without_settings_nothing_is_changed() -> None:
    shaping = Shaping.of(SamplingConfig(), 10)
    rollout = rollout_of(10, reward=1.0)
    assert shaping.shaped(rollout) is rollout
    assert shaping.taking_part([rollout, two_turns(None)]) == (rollout,)
    assert shaping.keeps([5.0, -7.0])


def test_rollouts_cut_by_a_limit_are_filtered() -> None:
    cut = make_rollout([make_call(0, [1], [2, 3], finish_reason="length"), make_call(1, [1], [2])])
    greedy = make_rollout([make_call(0, [1], [2], finish_reason="length", sampling=Sampling(temperature=0.0))])
    overflow = rollout_of(1, reward=0.0, outcome=Outcome.CONTEXT_OVERFLOW)
    assert [was_truncated(one) for one in (cut, greedy, overflow, two_turns())] == [True, False, True, False]
    assert Shaping(drop_truncated=True).taking_part([cut, greedy, overflow]) == (greedy,)
    assert Shaping().taking_part([cut, greedy, overflow]) == (cut, greedy, overflow)


def test_bounds_of_the_mean_reward_include_their_ends() -> None:
    shaping = Shaping(reward_low=0.25, reward_high=0.75)
    assert [shaping.keeps(rewards) for rewards in ([0.0, 0.5], [0.0, 0.25], [1.0, 0.5], [1.0, 1.0])] == [
        True,
        False,
        True,
        False,
    ]
    assert Shaping(reward_low=0.25).keeps([9.0])


def test_advantages_use_the_shaped_rewards_and_the_record_keeps_the_given_ones() -> None:
    """Rewards 1 and 1; the second answer is 9 tokens of 10 with a cache of 4: 1 - 0.75 = 0.25, mean 0.625."""
    sampling = SamplingConfig(overlong_cache=4)
    algorithm = resolve("dr_grpo", LossConfig(), 2, max_tokens=10, sampling=sampling)
    group = make_group([rollout_of(3, reward=1.0), rollout_of(9, reward=1.0, index=1)])
    batch = make_batch([group], algorithm)
    first, second = batch.experiences
    assert first.advantages_T[-1] == pytest.approx(0.375)
    assert second.advantages_T[-1] == pytest.approx(-0.375)
    assert (batch.reward_mean, batch.reward_shaped_mean, batch.num_zero_variance_groups) == (1.0, 0.625, 0)
    np.testing.assert_equal([rollout.reward for rollout in group.rollouts], [1.0, 1.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlong_length": 5}, "overlong_length has no effect"),
        ({"overlong_cache": 11}, r"overlong_cache is 11, but the longest answer is 10 tokens \(model.max_tokens\)"),
        ({"overlong_cache": 5, "overlong_length": 20}, "above 15 tokens, but model.max_tokens is 10"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shaping.of(SamplingConfig(**settings), 10)  # type: ignore[arg-type]


def test_bounds_the_wrong_way_round_and_half_a_curriculum_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward_low \(1\) must be at most reward_high \(0\)"):
        SamplingConfig(reward_low=1.0, reward_high=0.0)
    for settings in ({"order": "curriculum"}, {"curriculum_key": "level"}):
        with pytest.raises(ValueError, match="go together"):
            SamplingConfig(**settings)  # type: ignore[arg-type]
