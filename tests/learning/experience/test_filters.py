"""Groups that are left out: by which rule, how minibatches are split around them, and what the certificate says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from experience_builders import audited, make_call, make_group, make_rollout, two_turns
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import LossConfig, SamplingConfig
from sharpen.learning.algorithm.presets import PRESETS, Algorithm
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.shaping import Shaping
from sharpen.learning.experience.draw import Batch, draw_batches, left_out, make_batch, split_minibatches
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_trained
from sharpen.types import Check, Group, Rollout

GRPO = PRESETS["grpo"]
FILTERING = replace(GRPO, std_threshold=0.0, shaping=Shaping(reward_low=0.2, reward_high=0.8))


def group_of(name: str, *rewards: float | None) -> Group:
    return make_group([two_turns(reward, name, index) for index, reward in enumerate(rewards)], name)


def cut(group: str, index: int, reward: float = 1.0) -> Rollout:
    return make_rollout([make_call(0, [1], [2, 3], finish_reason="length")], reward, group, index)


def check(name: str, groups: list[Group], batches: list[Batch], algorithm: Algorithm) -> Check:
    return audited(groups, batches, algorithm, group_size=len(groups[0].rollouts))[name]


def test_each_reason_by_hand() -> None:
    groups = {
        None: group_of("a", 1.0, 0.0),  # mean 0.5
        "filtered": group_of("b", 1.0, 0.9),  # mean 0.95
        "flat": group_of("c", 1.0, 1.0),  # also above the bound: the spread is looked at first
        "small": group_of("d", 1.0, None),
    }
    assert [left_out(group, FILTERING) for group in groups.values()] == list(groups)
    batch = make_batch(list(groups.values()), FILTERING)
    assert batch.left_out == {"b": "filtered", "c": "flat", "d": "small"}
    assert batch.group_ids == ("a",)
    metrics = batch.metrics()
    dropped = [metrics[f"groups_dropped_{name}"] for name in ("filtered", "flat", "small")]
    assert dropped == [1, 1, 1]
    assert {e.group_id for e in batch.experiences} == {"a"}


def test_std_threshold_of_multi_step_grpo_by_hand() -> None:
    """Rewards 1 and 0 deviate by sqrt(1/2); 1 and 0.5 by sqrt(1/8), which is at the threshold and so dropped."""
    algorithm = resolve("multi_step_grpo", LossConfig(std_threshold=0.125**0.5), 2)
    groups = [group_of("a", 1.0, 0.0), group_of("b", 1.0, 0.5), group_of("c", 0.5, 0.5)]
    batch = make_batch(groups, algorithm)
    assert batch.left_out == {"b": "flat", "c": "flat"}
    score = 0.5 / (0.5**0.5 + 1e-6)
    assert [float(e.advantages_T[-1]) for e in batch.experiences] == pytest.approx([score, -score])
    assert sum(float(e.weights_T.sum()) for e in batch.experiences) == pytest.approx(1.0)


def test_an_algorithm_that_compares_nothing_is_filtered_too() -> None:
    reinforce = replace(PRESETS["reinforce"], shaping=Shaping(reward_low=0.5))
    assert [left_out(group_of("a", reward), reinforce) for reward in (0.4, 0.5)] == ["filtered", None]


def test_a_rollout_that_was_cut_is_in_neither_statistics_nor_loss() -> None:
    """Rewards 1, 0 and a cut 1: the baseline is 0.5, not 2/3; a group with one left is too small."""
    algorithm = resolve("dr_grpo", LossConfig(), 3, max_tokens=8, sampling=SamplingConfig(overlong_filter=True))
    group = make_group([two_turns(1.0, "a"), two_turns(0.0, "a", 1), cut("a", 2)], "a")
    small = make_group([two_turns(1.0, "b"), cut("b", 1), cut("b", 2)], "b")
    batch = make_batch([group, small], algorithm)
    assert [float(e.advantages_T[-1]) for e in batch.experiences] == [0.5, -0.5]
    assert (batch.num_cut_rollouts, batch.num_excluded_rollouts) == (3, 0)
    assert batch.left_out == {"b": "small"}
    means = check("group_means", [group, small], [batch], algorithm)
    assert (means.checked, means.broken) == (1, 0)


def test_minibatches_hold_equally_many_groups_that_train() -> None:
    """Red when `split_minibatches` counts the groups that are left out."""
    groups = [group_of(name, 1.0, 0.0 if name.islower() else 1.0) for name in "ABcDdEFefG"]
    parts = split_minibatches(groups, 2, FILTERING)
    assert ["".join(group.id for group in part) for part in parts] == ["ABcDdEF", "efG"]
    batches = draw_batches(groups, FILTERING, 2)
    assert [batch.group_ids for batch in batches] == [("c", "d"), ("e", "f")]
    assert [sum(e.weights_T.sum() for e in batch.experiences) for batch in batches] == pytest.approx([1.0, 1.0])
    only_flat = [group_of("A", 1.0, 1.0), group_of("B", 1.0, 1.0)]
    assert split_minibatches(only_flat, 2, FILTERING) == [tuple(only_flat)]


@given(trains=st.lists(st.booleans(), max_size=20), num_parts=st.integers(1, 6))
def test_a_split_loses_and_reorders_nothing(trains: list[bool], num_parts: int) -> None:
    groups = [group_of(str(i), 1.0, 0.0 if train else 1.0) for i, train in enumerate(trains)]
    parts = split_minibatches(groups, num_parts, FILTERING)
    assert [group for part in parts for group in part] == groups
    counts = [sum(left_out(group, FILTERING) is None for group in part) for part in parts]
    assert not counts or max(counts) - min(counts) <= 1
    assert len(parts) == min(num_parts, max(sum(trains), 1), len(trains))


def test_the_certificate_sees_a_group_that_was_left_out_without_a_reason_or_trained_against_it() -> None:
    """Red when `_check_group` takes what the batch says for granted."""
    groups = [group_of("a", 1.0, 0.0), group_of("b", 1.0, 1.0), group_of("c", 0.1, 0.0)]
    batch = make_batch(groups, FILTERING)
    assert check("groups", groups, [batch], FILTERING) == Check(name="groups", checked=3, broken=0)
    dropped = make_batch([groups[0]], replace(FILTERING, shaping=Shaping(reward_low=0.9)))
    found = check("groups", groups[:1], [dropped], FILTERING)
    assert found.first == "group a: filtered, but its rewards say trained"
    found = check("groups", groups, [make_batch(groups, GRPO)], FILTERING)
    assert (found.broken, found.first) == (2, "group b: trained, but its rewards say flat")
    assert check("groups", groups, [], FILTERING).first == "group a: in 0 batches"
    assert check("groups", groups, [batch, batch], FILTERING).broken == 3


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0]), min_size=1, max_size=6),
    threshold=st.sampled_from([None, 0.0, 0.1, 0.5]),
    low=st.sampled_from([None, 0.0, 0.2, 0.3]),
    high=st.sampled_from([None, 0.3, 0.5, 1.0]),
)
def test_the_certificate_agrees_with_every_choice_that_is_right(
    rewards: list[float], threshold: float | None, low: float | None, high: float | None
) -> None:
    algorithm = replace(GRPO, std_threshold=threshold, shaping=Shaping(reward_low=low, reward_high=high))
    group = group_of("a", *rewards)
    found = check("groups", [group], [make_batch([group], algorithm)], algorithm)
    assert (found.checked, found.broken) == (1, 0), found.first


@pytest.mark.parametrize(
    ("names", "max_refill", "right"),
    [
        ("abC", 1.0, True),  # one further for C
        ("aBC", 0.5, True),  # the bound of one further task is reached
        ("aBC", 1.0, False),  # one more was allowed, and b is missing
        ("aBCd", 1.0, True),
        ("abC", 0.0, False),  # nothing further was allowed
        ("ab", 0.0, True),
        ("aB", 0.0, True),
        ("abc", 1.0, False),  # more train than were asked for
    ],
)
def test_the_certificate_counts_the_groups_of_a_refilled_step(names: str, max_refill: float, right: bool) -> None:
    """Capitals are flat groups. Red when `_check_refill` is not called."""
    algorithm = replace(FILTERING, max_refill=max_refill)
    groups = [group_of(name, 1.0, 0.0 if name.islower() else 1.0) for name in names]
    batch = make_batch(groups, algorithm)
    accounted = audited(groups, [batch], algorithm, batch_size=2)["accounted"]
    assert (accounted.broken == 0) is right
    assert right or re.match(rf"{len(names)} groups .* of 2, \d of them train", accounted.first or "")


def test_a_step_that_is_done_again_replaces_what_it_had_trained(tmp_path: Path) -> None:
    """Red when `insert_step` (records.py) keeps the rows of the attempt that an interruption undid."""
    first, second = (make_batch([group_of(name, 1.0, 0.0)], GRPO).experiences for name in "ab")
    with Journal(tmp_path / "run.db") as journal:
        for experiences in (first, second):
            journal.add_step(2, 3, {}, experiences)
        journal.add_step(1, 2, {}, first)
    trained = read_trained(tmp_path / "run.db")
    assert {(call.step, call.group_id) for call in trained} == {(2, "b"), (1, "a")}
