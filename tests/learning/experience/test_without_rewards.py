"""Batches of algorithms that learn without rewards, and what the certificate says of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from experience_builders import audited, make_call, make_group, make_rollout, two_turns

from sharpen.evidence.certificate.checks import FAILURES
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.algorithm.returns import Scores
from sharpen.learning.experience.draw import left_out, make_batch
from sharpen.types import Outcome

JSD = PRESETS["jsd"]


def without_reward(index):
    return replace(two_turns(1.0, index=index), reward=None, outcome=Outcome.OK)


def test_rollouts_without_reward_train_and_failed_ones_do_not():
    """A lone one is enough for a group. Red when `left_out` counts rewards instead of rollouts."""
    failed = make_rollout([make_call(0, [1, 2], [3])], None, index=1)
    group = make_group([without_reward(0), failed])
    assert failed.outcome == Outcome.TIMEOUT
    assert left_out(group, JSD) is None
    batch = make_batch([group], JSD)
    assert {experience.rollout_id for experience in batch.experiences} == {"g/0"}
    (experience,) = batch.experiences
    assert not experience.advantages_T.any()
    assert math.isclose(float(experience.weights_T.sum()), 1.0, rel_tol=1e-6)
    assert (batch.num_rollouts, batch.num_excluded_rollouts, batch.num_zero_variance_groups) == (1, 1, 0)
    assert not any(name.startswith("reward") for name in batch.metrics())
    checks = audited([group], [batch], JSD)
    assert checks[FAILURES].checked == 1
    assert not any(check.broken for check in checks.values())
    assert left_out(make_group([failed]), JSD) == "small"


def test_equal_rewards_are_no_loss_where_they_do_not_matter():
    group = make_group([two_turns(1.0), two_turns(1.0, index=1)])
    batch = make_batch([group], JSD)
    assert (batch.num_zero_variance_groups, batch.num_zero_variance_tokens) == (0, 0)
    assert batch.metrics()["reward_mean"] == 1.0
    assert make_batch([group], PRESETS["grpo"]).num_zero_variance_groups == 1


def test_the_certificate_sees_a_failed_rollout_and_a_missing_reward_where_one_is_needed():
    """Red when `_check_failure` lets every rollout without a reward pass."""
    group = make_group([without_reward(0), without_reward(1)])
    batch = make_batch([group], JSD)
    needed = audited([group], [batch], PRESETS["reinforce"])[FAILURES]
    assert needed.broken == 2
    broken = replace(group, rollouts=(replace(group.rollouts[0], outcome=Outcome.TIMEOUT), group.rollouts[1]))
    check = audited([broken], [batch], JSD)[FAILURES]
    assert check.broken == 1
    assert check.first == "rollout g/0 (timeout, reward None)"


def test_an_algorithm_that_needs_rewards_never_makes_one_up():
    group = make_group([without_reward(0), without_reward(1)])
    assert left_out(group, PRESETS["grpo"]) == "small"
    with pytest.raises(ValueError, match="finite"):
        PRESETS["reinforce"].advantages(Scores.of_rollouts([1.0, np.nan]))
