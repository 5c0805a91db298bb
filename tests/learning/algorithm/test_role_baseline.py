"""`rae`: numbers worked out by hand, those of its authors' code, and what does not matter."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import LossConfig, SamplingConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.learning.algorithm.advantages import rae
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.returns import Scores
from sharpen.learning.algorithm.role_baseline import moved, role_of
from sharpen.types import Task

REWARDS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12)
DECAYS = st.sampled_from([0.0, 0.5, 0.75, 0.95])


def test_baselines_by_hand() -> None:
    # first: rewards 1 and 0 have the mean 0.5, which it is; second: 1, 1, -2 have the mean 0; third: 0.2 * 4
    found = moved({"first": 0.5}, {"first": [1.0, 0.0], "second": [1.0, 1.0, -2.0], "third": [4.0]}, decay=0.8)
    assert found == pytest.approx({"first": 0.5, "second": 0.0, "third": 0.8})
    # two rewards of 1: 0.8 * 0.5 + 0.2 = 0.6, then 0.8 * 0.6 + 0.2 = 0.68; a role without rewards stays
    assert moved({"a": 0.5, "b": 3.0}, {"a": [1.0, 1.0], "b": []}, decay=0.8) == pytest.approx({"a": 0.68, "b": 3.0})


def test_advantages_by_hand() -> None:
    scores = replace(
        Scores.of_rollouts([1.0, -1.0, 0.5], [0, 0, 1], [2, 1, 1]), baselines_R=np.array([0.25, 0.25, -1.0])
    )
    assert rae(scores).tolist() == [0.75, 0.75, -1.25, 1.5]
    with pytest.raises(ValueError, match="needs the baseline of each rollout's role"):
        rae(Scores.of_rollouts([1.0]))


def test_a_game_in_each_step_is_what_spiral_computes() -> None:
    """Both players of four games of a zero-sum game: what `prepare_trajectories` of spiral-rl/spiral's
    `train_spiral.py` (75ea2ef) takes from their rewards with its `EMA` of 0.95, which begins at 0: read before it is
    updated, player by player. Worked out with these two lines of arithmetic, not run."""
    games = [(1.0, -1.0), (1.0, -1.0), (-1.5, 0.5), (0.0, 0.0)]
    expected = [(1.0, -1.0), (0.95, -0.95), (-1.5975, 0.5975), (-0.017625, 0.067625)]
    roles: dict[str, float] = {}
    for rewards, of_players in zip(games, expected, strict=True):
        baselines_R = np.array([roles.get(player, 0.0) for player in ("0", "1")])
        found = rae(replace(Scores.of_rollouts(rewards), baselines_R=baselines_R))
        np.testing.assert_allclose(found, of_players, rtol=1e-12)
        roles = moved(roles, {"0": [rewards[0]], "1": [rewards[1]]}, decay=0.95)


@given(rewards=REWARDS, baseline=st.integers(-8, 8).map(float), decay=DECAYS, seed=st.integers(0, 99))
def test_the_order_of_a_steps_rewards_does_not_matter(
    rewards: list[float], baseline: float, decay: float, seed: int
) -> None:
    other = Random(seed).sample(rewards, len(rewards))
    found = moved({"a": baseline}, {"a": rewards}, decay=decay)["a"]
    assert moved({"a": baseline}, {"a": other}, decay=decay)["a"] == pytest.approx(found, abs=1e-12)
    lowest, highest = min(*rewards, baseline), max(*rewards, baseline)
    assert lowest - 1e-9 <= found <= highest + 1e-9


@given(reward=st.integers(-8, 8).map(float), first=st.integers(1, 6), second=st.integers(1, 6), decay=DECAYS)
def test_equal_rewards_in_one_step_or_in_two_are_the_same(reward: float, first: int, second: int, decay: float) -> None:
    once = moved({}, {"a": [reward] * (first + second)}, decay=decay)
    twice = moved(moved({}, {"a": [reward] * first}, decay=decay), {"a": [reward] * second}, decay=decay)
    assert once["a"] == pytest.approx(twice["a"], abs=1e-12)


def test_a_role_is_what_the_row_says() -> None:
    task = Task(id="train/0", index=0, row={"environment": "poker", "player": 1})
    assert role_of(task, ["environment", "player"]) == "poker/1"
    assert role_of(task, ()) == ""
    with pytest.raises(
        DatasetError, match=r"roles has 'role', and task train/0 has no such field \(it has environment"
    ):
        role_of(task, ["role"])


def test_settings_that_make_no_role_are_refused() -> None:
    assert resolve("rae", LossConfig(advantage_args={"roles": ["player"], "decay": 0}), 1).decay == 0.0
    for roles in ("player", [""], [1], {"a": 1}):
        with pytest.raises(ConfigError, match=re.escape(f"roles is {roles!r}: give a list of fields")):
            resolve("rae", LossConfig(advantage_args={"roles": roles}), 1)
    for decay in (1.0, -0.1, "0.5", True, float("nan")):
        with pytest.raises(ConfigError, match=r"decay is .*: give a number from 0 to below 1"):
            resolve("rae", LossConfig(advantage_args={"decay": decay}), 1)


def test_replay_is_refused() -> None:
    from sharpen.config.public import AlgorithmConfig
    from sharpen.learning.experience.replay import replay_settings

    algorithm = resolve("rae", LossConfig(), 2)
    with pytest.raises(ConfigError, match="the rewards of replayed rollouts have moved the baselines"):
        replay_settings(
            SamplingConfig(replay_share=0.5),
            AlgorithmConfig(algorithm_type="rae"),
            algorithm,
            seed=0,
            updates=1,
            ahead=0,
        )
