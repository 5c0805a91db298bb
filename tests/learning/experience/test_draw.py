"""Drawing a batch: advantages, weights, counts, and that merging changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
from experience_builders import call_trees, make_call, make_group, make_rollout, two_turns, unmerged
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.config.run import AGGREGATIONS
from sharpen.errors import CallError
from sharpen.learning.algorithm.presets import PRESETS, Algorithm
from sharpen.learning.experience.draw import Batch, make_batch, score, split_minibatches
from sharpen.types import Call, CallStatus, Experience, Group

GRPO = PRESETS["grpo"]


def tokens(batch: Batch) -> dict[tuple[str, int], list[tuple[int, float, float]]]:
    """By (rollout, call): id, advantage and weight of each loss token."""
    found: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for e in batch.experiences:
        for position in np.flatnonzero(e.loss_mask_T):
            key = (e.rollout_id, int(e.calls_T[position]))
            values = (int(e.ids_T[position]), float(e.advantages_T[position]), float(e.weights_T[position]))
            found.setdefault(key, []).append(values)
    return found


def test_batch_by_hand() -> None:
    # Rewards 1 and 0: mean 0.5, std sqrt(0.5). Rollout 0 has two calls (2 and 1 tokens), rollout 1 one call of 1 token.
    group = make_group([two_turns(1.0), make_rollout([make_call(0, [1, 2], [3])], 0.0, index=1)])
    batch = make_batch([group], replace(GRPO, aggregation="rollout-mean"))
    score = 0.5 / (np.sqrt(0.5) + 1e-6)
    first, second = batch.experiences
    assert first.advantages_T.tolist() == pytest.approx([0, 0, 0, score, score, 0, 0, score])
    assert first.weights_T.tolist() == pytest.approx([0, 0, 0, 1 / 6, 1 / 6, 0, 0, 1 / 6])
    assert second.advantages_T.tolist() == pytest.approx([0, 0, -score])
    assert second.weights_T.tolist() == pytest.approx([0, 0, 1 / 2])
    assert batch.rollout_weights == pytest.approx({"g/0": 0.5, "g/1": 0.5})
    assert (batch.num_groups, batch.num_rollouts, batch.num_calls) == (1, 2, 3)
    assert (batch.num_tokens, batch.num_loss_tokens) == (11, 4)
    assert (batch.reward_mean, batch.reward_std) == (0.5, 0.5)
    assert batch.metrics()["sequences"] == 2


def test_step_norm_divides_by_the_trained_calls() -> None:
    group = make_group([two_turns(1.0), make_rollout([make_call(0, [1, 2], [3])], 0.0, index=1)])
    batch = make_batch([group], replace(PRESETS["multi_step_grpo"], advantage_args={"step_norm": True}))
    score = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert batch.experiences[0].advantages_T[3] == pytest.approx(score / 2)
    assert batch.experiences[1].advantages_T[2] == pytest.approx(-score)


def algorithms() -> list[Algorithm]:
    """Every preset under every aggregation, and the step-wise one with step norm."""
    presets = [*PRESETS.values(), replace(PRESETS["multi_step_grpo"], advantage_args={"step_norm": True})]
    return [
        replace(preset, aggregation=aggregation, constant_length=7)  # type: ignore[arg-type]
        for preset in presets
        for aggregation in AGGREGATIONS
    ]


ALGORITHMS = algorithms()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(call_trees(4), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=4), st.integers(0, 6))
def test_trap_17_merging_changes_no_weight_and_no_advantage(
    members: list[tuple[list[Call], float]], first: int
) -> None:
    """Red when `_make_experiences` numbers sequences instead of calls."""
    whole = make_group([make_rollout(calls, reward, index=i) for i, (calls, reward) in enumerate(members)])
    apart = make_group([make_rollout(unmerged(calls), reward, index=i) for i, (calls, reward) in enumerate(members)])
    for algorithm in ALGORITHMS[first::7]:  # every aggregation is among them
        assert tokens(make_batch([whole], algorithm)) == tokens(make_batch([apart], algorithm))


def test_trap_19_weights_are_normalized_once_over_the_whole_update() -> None:
    """Red when `make_batch` weighs each group by itself."""
    groups = [make_group([two_turns(1.0, g), two_turns(0.0, g, 1)], g) for g in ("a", "b")]
    batch = make_batch(groups, GRPO)
    assert sum(float(e.weights_T.sum()) for e in batch.experiences) == pytest.approx(1.0)
    assert batch.experiences[0].weights_T[3] == pytest.approx(1 / 12)


def test_trap_16_a_group_shrunk_to_one_is_dropped() -> None:
    """Red when `left_out` lets a lone rollout through."""
    lone = make_group([two_turns(1.0), two_turns(None, index=1)])
    batch = make_batch([lone], GRPO)
    assert batch.experiences == ()
    assert (batch.num_groups, batch.num_small_groups, batch.num_excluded_rollouts) == (0, 1, 1)
    assert make_batch([], GRPO).metrics()["rollout_weight_max"] == 0.0


def test_trap_16_members_of_two_tasks_in_one_group_are_refused() -> None:
    """Red when `_check_members` does not compare ids."""
    with pytest.raises(CallError, match="holds rollout b/1 of group b"):
        make_batch([make_group([two_turns(1.0), two_turns(0.0, "b", 1)])], GRPO)


def test_trap_21_failed_rollouts_are_not_in_the_baseline() -> None:
    """Red when a missing reward counts as 0."""
    group = make_group([two_turns(1.0), two_turns(0.0, index=1), two_turns(None, index=2)])
    batch = make_batch([group], replace(GRPO, advantage_args={"std_normalize": False}))
    assert [float(e.advantages_T.max() + e.advantages_T.min()) for e in batch.experiences] == [0.5, -0.5]
    assert batch.num_excluded_rollouts == 1


def test_trap_20_groups_without_spread_are_counted() -> None:
    """Red when `num_zero_variance` is not counted; with a threshold they are dropped and counted as such."""
    flat = make_group([two_turns(0.3), two_turns(0.3, index=1)])
    spread = make_group([two_turns(1.0, "h"), two_turns(0.0, "h", 1)], "h")
    batch = make_batch([flat, spread], GRPO)
    assert (batch.num_groups, batch.num_zero_variance_groups, batch.num_zero_variance_tokens) == (2, 1, 6)
    assert not any(e.advantages_T.any() for e in batch.experiences[:2])
    assert sum(float(e.weights_T.sum()) for e in batch.experiences[:2]) == pytest.approx(0.5)
    dropped = make_batch([flat, spread], replace(GRPO, std_threshold=0.0))
    assert (dropped.num_groups, dropped.num_flat_groups, dropped.num_zero_variance_groups) == (1, 1, 0)
    assert {e.group_id for e in dropped.experiences} == {"h"}


def test_minibatches_are_parts_of_the_groups_with_weights_of_their_own() -> None:
    groups = [make_group([two_turns(1.0, g), two_turns(0.0, g, 1)], g) for g in "abcde"]
    parts = split_minibatches(groups, 2)
    assert [[group.id for group in part] for part in parts] == [["a", "b"], ["c", "d", "e"]]
    whole = {(e.rollout_id): e for e in make_batch(groups, GRPO).experiences}
    for part in parts:
        batch = make_batch(part, GRPO)
        assert sum(float(e.weights_T.sum()) for e in batch.experiences) == pytest.approx(1.0)
        for e in batch.experiences:
            np.testing.assert_array_equal(e.advantages_T, whole[e.rollout_id].advantages_T)


def test_there_are_never_more_minibatches_than_groups() -> None:
    group = make_group([two_turns()])
    assert split_minibatches([group], 4) == [(group,)]
    assert split_minibatches([], 4) == []


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(4)))
def test_the_order_of_groups_changes_nothing(order: list[int]) -> None:
    groups = [make_group([two_turns(float(i), g), two_turns(0.0, g, 1)], g) for i, g in enumerate("abcd")]
    shuffled: list[Group] = [groups[i] for i in order]
    assert tokens(make_batch(shuffled, GRPO)) == tokens(make_batch(groups, GRPO))


def test_a_rollout_that_the_workflow_left_out_is_in_the_baseline_only() -> None:
    empty = make_rollout([make_call(0, [1], [2], status=CallStatus.LEFT_OUT)], 0.0, index=1)
    batch = make_batch([make_group([two_turns(1.0), empty])], replace(GRPO, aggregation="rollout-mean"))
    experiences: tuple[Experience, ...] = batch.experiences
    assert len(experiences) == 1
    assert batch.rollout_weights == pytest.approx({"g/0": 1.0, "g/1": 0.0})


def test_advantages_of_the_batch_are_those_of_the_step_also_in_minibatches() -> None:
    """Red when `make_batch` computes them over its own part: REINFORCE++ compares the rollouts of the whole step."""
    groups = [make_group([two_turns(float(i), g), two_turns(0.0, g, 1)], g) for i, g in enumerate("abcd")]
    algorithm = PRESETS["reinforceplusplus"]
    advantages = score(groups, algorithm)
    whole = tokens(make_batch(groups, algorithm))
    for part in split_minibatches(groups, 2):
        for key, values in tokens(make_batch(part, algorithm, advantages)).items():
            assert [value[:2] for value in values] == [value[:2] for value in whole[key]]


def test_rewards_of_steps_reach_the_algorithms_that_use_them() -> None:
    one = replace(two_turns(1.0), step_rewards={0: 0.5, 1: 1.0})
    other = replace(two_turns(0.2, index=1), step_rewards={0: 0.0, 1: 0.2})
    batch = make_batch([make_group([one, other])], replace(GRPO, advantage="step_rewards", advantage_args={}))
    # Returns 1.5, 1, 0.2, 0.2 with mean 0.725; the first call has two tokens, the second one.
    assert tokens(batch)["g/0", 0][0][1] == pytest.approx(0.775)
    assert tokens(batch)["g/0", 1][0][1] == pytest.approx(0.275)
    assert tokens(batch)["g/1", 1][0][1] == pytest.approx(-0.525)
