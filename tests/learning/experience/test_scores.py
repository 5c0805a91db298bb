"""What advantages are computed from: rewards counted once, rewards of steps, states, and who takes part."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from experience_builders import make_call, make_group, make_rollout, two_turns
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.learning.algorithm.presets import PRESETS, Algorithm
from sharpen.learning.algorithm.returns import discounted_returns
from sharpen.learning.algorithm.shaping import Shaping
from sharpen.learning.experience.draw import left_out, make_batch, score, scores_of, shown, state_of
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups
from sharpen.types import Call, CallStatus, Group, Rollout, Sampling

GRPO, GIGPO, PPO = PRESETS["grpo"], PRESETS["gigpo"], PRESETS["ppo"]
STEPS = replace(GRPO, advantage="step_rewards", advantage_args={})
REWARDS = st.integers(-16, 16).map(lambda n: n / 8)


def rollout_of(num_calls: int, reward: float, index: int = 0, **changes: Any) -> Rollout:
    """Calls that each say something else; what a Trinity workflow writes on all of them is the reward."""
    calls = [
        make_call(number, [1, number], [2, 3], messages=({"role": "user", "content": f"{index} {number}"},))
        for number in range(num_calls)
    ]
    given_rewards = dict.fromkeys(range(num_calls), reward)
    return make_rollout(calls, reward, index=index, **{"call_rewards": given_rewards, **changes})


@settings(max_examples=25)
@given(REWARDS, st.integers(1, 6), st.sampled_from([CallStatus.USED, CallStatus.LEFT_OUT, CallStatus.ABANDONED]))
def test_trap_34_the_return_of_a_rollout_is_its_reward_however_many_calls(
    reward: float, num_calls: int, status: CallStatus
) -> None:
    """Red when what was written on each call is added up. A call in the middle may be no trained one."""
    rollout = rollout_of(num_calls, reward)
    middle = replace(rollout.calls[num_calls // 2], status=status)
    calls = tuple(middle if call.index == middle.index else call for call in rollout.calls)
    scores = scores_of([replace(rollout, calls=calls)], {})
    assert scores.returns_R.tolist() == [reward]
    assert discounted_returns(scores, 1.0).tolist() == [reward] * len(scores.rollouts_C)


@pytest.mark.parametrize("algorithm", [GIGPO, STEPS, GRPO, PRESETS["rloo"], PRESETS["multi_step_grpo"]])
@settings(max_examples=25)
@given(reward=REWARDS, counts=st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_trap_34_a_flat_group_stays_flat(algorithm: Algorithm, reward: float, counts: list[int]) -> None:
    group = make_group([rollout_of(count, reward, index) for index, count in enumerate(counts)])
    assert not any(advantages.any() for advantages in score([group], algorithm).values())
    assert make_batch([group], algorithm).num_zero_variance_groups == 1
    assert left_out(group, replace(algorithm, std_threshold=0.0)) == "flat"


def test_first_tokens_return_under_ppo_is_the_reward_with_one_call_and_with_four() -> None:
    """The rewards that GAE begins with: 1.0 after the last call alone (it was 1.0 after each, and 4.0 in all)."""
    group = make_group([rollout_of(1, 1.0), rollout_of(4, 1.0, 1)])
    found = score([group], PPO)
    assert found["g/0"].tolist() == [1.0]
    assert found["g/1"].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_rewards_of_steps_come_after_the_trained_call_that_earned_them() -> None:
    """Calls 0 and 2 were greedy, 1, 3 and 4 trained; what call 2 earned comes after call 1, what call 0 earned is in
    the episode's return alone."""
    rollout = rollout_of(5, 9.0, step_rewards={0: 0.5, 1: 1.0, 2: 2.0, 4: 4.0})
    greedy = Sampling(temperature=0.0)
    calls = tuple(replace(call, sampling=greedy) if call.index in (0, 2) else call for call in rollout.calls)
    scores = scores_of([replace(rollout, calls=calls)], {})
    assert scores.step_rewards_C.tolist() == [3.0, 0.0, 4.0]
    assert scores.returns_R.tolist() == [7.5]
    assert discounted_returns(scores, 0.5).tolist() == [3.0 + 0.5 * 0.5 * 4.0, 0.5 * 4.0, 4.0]


def tool_call(index: int, call_id: str, tool: str, result: str, **more: Any) -> Call:
    asked = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": "{}"}}
    messages = (
        {"role": "system", "content": f"You are a helper. It is {index} o'clock."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": call_id, "content": result, **more},
    )
    return make_call(index, [1, 2], [3], messages=messages)


def test_trap_36_the_same_observation_is_one_state_whatever_the_ids() -> None:
    """Red when the id of a tool's call, unique in each rollout, is part of the state: GiGPO's second term never
    acted."""
    one = make_rollout([tool_call(0, "call_a1", "look", "a door")], 1.0)
    other = make_rollout([tool_call(0, "call_b2", "look", "a door", name="look")], 0.0, index=1)
    assert state_of(one, one.calls[0]) == state_of(other, other.calls[0])
    found = score([make_group([one, other])], GIGPO)
    assert (found["g/0"].tolist(), found["g/1"].tolist()) == ([1.0], [-1.0])  # 0.5 of the episode, 0.5 of the state
    for different in (tool_call(0, "c", "take", "a door"), tool_call(0, "c", "look", "a wall")):
        assert state_of(one, one.calls[0]) != state_of(one, different)


def test_what_the_environment_showed_is_all_since_the_model_spoke() -> None:
    ask = {"role": "user", "content": "go"}
    calls = [{"id": name, "function": {"name": f"tool_{name}", "arguments": "{}"}} for name in "ab"]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "ab"]
    assert shown([{"role": "developer", "content": "now: 12:01"}, ask]) == [("user", None, "go")]
    both = [("tool", "tool_a", "A"), ("tool", "tool_b", "B")]
    assert shown([ask, answer, *results]) == both
    assert shown([ask, answer, *results, {"role": "assistant", "content": "The answer"}]) == both  # it begins so
    parts = [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]
    assert shown([answer, {"role": "user", "content": parts}]) == [("user", None, "go")]
    assert shown([]) == []


def test_a_state_that_was_told_counts_instead() -> None:
    one, other = (replace(rollout_of(1, reward, index), states={0: "hall"}) for index, reward in enumerate((1.0, 0.0)))
    found = score([make_group([one, other])], GIGPO)
    assert (found["g/0"].tolist(), found["g/1"].tolist()) == ([1.0], [-1.0])
    apart = [replace(one, states={0: "attic"}), other]
    assert score([make_group(apart)], GIGPO)["g/0"].tolist() == [0.5]


def without_call(reward: float, index: int) -> Rollout:
    """The agent answered without asking, or its only call never came back."""
    calls = [] if index % 2 else [make_call(0, [1], [2], status=CallStatus.ABANDONED)]
    return make_rollout(calls, reward, index=index)


@pytest.mark.parametrize(
    "name",
    ["grpo", "rloo", "dr_grpo", "gigpo", "reinforceplusplus_baseline", "reinforceplusplus", "opmd", "raft", "rec"],
)
@settings(max_examples=25)
@given(
    rewards=st.lists(REWARDS, min_size=2, max_size=4),
    others=st.lists(REWARDS, min_size=1, max_size=4),
)
def test_rollouts_without_a_call_are_in_no_baseline(name: str, rewards: list[float], others: list[float]) -> None:
    """Red when only a missing reward keeps a rollout out: half of a group with no call and reward 1 pushed the others
    down."""
    algorithm = PRESETS[name]
    asked = [two_turns(reward, index=index) for index, reward in enumerate(rewards)]
    silent = [without_call(reward, len(rewards) + index) for index, reward in enumerate(others)]
    alone, together = score([make_group(asked)], algorithm), score([make_group([*asked, *silent])], algorithm)
    assert alone.keys() == together.keys()
    for id_, advantages in alone.items():
        np.testing.assert_array_equal(together[id_], advantages)


def test_rollouts_without_a_call_do_not_make_a_group_large_enough_and_are_counted() -> None:
    group = make_group([two_turns(1.0), without_call(0.0, 1), without_call(0.0, 2), two_turns(None, index=3)])
    batch = make_batch([group], GRPO)
    assert batch.left_out == {"g": "small"}
    assert (batch.num_unanswered_rollouts, batch.num_excluded_rollouts, batch.num_cut_rollouts) == (2, 1, 0)
    assert batch.metrics()["rollouts_without_call"] == 2
    passed = replace(GRPO, advantage="pass_at_k", advantage_args={"k": 2})
    pair = [two_turns(1.0), two_turns(0.0, index=1)]
    found = score([make_group([*pair, without_call(1.0, 2)])], passed)
    assert found["g/0"].tolist() == score([make_group(pair)], passed)["g/0"].tolist()


def test_neither_the_bounds_nor_the_threshold_look_at_rollouts_without_a_call() -> None:
    group = make_group([two_turns(0.5), two_turns(0.5, index=1), without_call(1.0, 2)])
    assert left_out(group, replace(GRPO, std_threshold=0.0)) == "flat"
    assert left_out(group, replace(GRPO, shaping=Shaping(reward_low=0.6))) == "filtered"
    assert left_out(group, GRPO) is None
    assert make_batch([group], GRPO).num_zero_variance_groups == 1


def test_a_greedy_baseline_without_a_call_is_none() -> None:
    pair = [two_turns(1.0), two_turns(0.0, index=1)]
    assert left_out(make_group(pair, baseline=two_turns(0.5, index=2)), PRESETS["remax"]) is None
    assert left_out(make_group(pair, baseline=without_call(0.5, 2)), PRESETS["remax"]) == "small"


def test_the_threshold_looks_at_what_is_compared() -> None:
    """By hand: the last rewards are all 0, the episodes' returns 1 and 0; and the other way round."""

    def group_of(*rewards_of_steps: dict[int, float]) -> Group:
        rollouts = [rollout_of(2, 0.0, i, step_rewards=given) for i, given in enumerate(rewards_of_steps)]
        return make_group(rollouts)

    spread = group_of({0: 1.0, 1: 0.0}, {0: 0.0, 1: 0.0})
    for algorithm in (GIGPO, STEPS, PPO):
        assert left_out(spread, replace(algorithm, std_threshold=0.4)) is None
    assert left_out(spread, replace(GRPO, std_threshold=0.5)) == "flat"
    assert left_out(spread, replace(GIGPO, std_threshold=0.8)) == "flat"  # the deviation is 0.7071
    flat = make_group([replace(r, reward=float(r.index)) for r in group_of({0: 1.0}, {0: 1.0}).rollouts])
    assert left_out(flat, replace(GIGPO, std_threshold=0.0)) == "flat"
    assert left_out(flat, replace(GRPO, std_threshold=0.0)) is None
    # equal episodes whose steps differ in one state: 1 then 0, 0 then 1
    crossed = [replace(r, states={0: "start"}) for r in group_of({0: 1.0}, {1: 1.0}).rollouts]
    assert left_out(make_group(crossed), replace(GIGPO, std_threshold=0.0)) == "flat"  # returns 1 and 1 at the start
    later = [replace(r, states={1: "middle"}) for r in crossed]
    assert left_out(make_group(later), replace(GIGPO, std_threshold=0.0)) is None  # returns 0 and 1 in the middle


def test_the_threshold_looks_at_rewards_before_the_length_penalty() -> None:
    """As DAPO's constraint. Equal rewards of answers of one and of four tokens, of which the longer is punished."""
    short, long = (make_rollout([make_call(0, [1], [2] * n)], 1.0, index=i) for i, n in enumerate((1, 4)))
    punishes = replace(GRPO, std_threshold=0.0, shaping=Shaping(max_length=4, cache=2))
    assert left_out(make_group([short, long]), punishes) == "flat"
    assert make_batch([make_group([short, long])], replace(punishes, std_threshold=None)).num_zero_variance_groups == 0


def test_over_long_calls_are_punished_in_each_kind_of_reward() -> None:
    shaping = Shaping(max_length=4, cache=2)
    rollout = make_rollout(
        [make_call(0, [1], [2]), make_call(1, [1], [2] * 4)], 1.0, call_rewards={0: 1.0, 1: 1.0}, step_rewards={0: 0.5}
    )
    shaped = shaping.shaped(rollout)
    assert (shaped.reward, dict(shaped.call_rewards)) == (0.0, {0: 1.0, 1: 0.0})
    assert dict(shaped.step_rewards) == {0: 0.5, 1: -1.0}
    assert dict(shaping.shaped(replace(rollout, step_rewards={})).step_rewards) == {}


def test_rewards_of_steps_and_states_are_in_the_journal(tmp_path: Any) -> None:
    group = make_group([replace(two_turns(1.0), step_rewards={0: 0.25, 1: 0.75}, states={1: "hall"}), two_turns(None)])
    journal = Journal(tmp_path / "run.db")
    journal.add(group)
    journal.close()
    (found,) = read_groups(tmp_path / "run.db")
    assert (found.rollouts[0].step_rewards, found.rollouts[0].states) == ({0: 0.25, 1: 0.75}, {1: "hall"})
    assert (found.rollouts[1].step_rewards, found.rollouts[1].states) == ({}, {})


def test_an_older_journal_has_none(tmp_path: Any) -> None:
    import sqlite3

    journal = Journal(tmp_path / "run.db")
    journal.add(make_group([two_turns(1.0)]))
    journal.close()
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("DROP TABLE call_notes")
    connection.close()
    (found,) = read_groups(tmp_path / "run.db")
    assert (found.rollouts[0].step_rewards, found.rollouts[0].reward) == ({}, 1.0)
