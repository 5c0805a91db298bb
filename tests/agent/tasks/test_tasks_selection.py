"""Tasks from easy to hard, and tasks preferred by difficulty."""

from __future__ import annotations

import json
from collections import Counter
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.agent.tasks.order import DifficultyOrder, TaskOrder, easy_to_hard, make_order
from sharpen.config.run import SamplingConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.types import Task

SETTINGS = SamplingConfig(order="difficulty")


def tasks(*levels: object) -> list[Task]:
    return [Task(id=f"train/{i}", index=i, row={"level": level}) for i, level in enumerate(levels)]


def test_a_curriculum_goes_from_easy_to_hard_in_every_epoch() -> None:
    sampling = SamplingConfig(order="curriculum", curriculum_key="level")
    order = make_order(tasks(3, 1, 2.5, 1), sampling, seed=0, batch_size=2)
    assert [order.draw() for _ in range(3)] == [[1, 3], [2, 0], [1, 3]]


def test_a_curriculum_key_with_a_minus_sorts_descending() -> None:
    """Such as shares of rollouts that solved a task; equal ones stay as they came."""
    sampling = SamplingConfig(order="curriculum", curriculum_key="-level")
    order = make_order(tasks(0.5, 1, 0.25, 1), sampling, seed=0, batch_size=4)
    assert order.draw() == [1, 3, 0, 2]
    assert order.state()["order"] == "curriculum by -level"
    with pytest.raises(DatasetError, match=r"curriculum_key is '-level', but task train/0 has 'hard' there"):
        easy_to_hard(tasks("hard"), "-level")


@pytest.mark.parametrize("value", ["hard", None, True, float("nan")])
def test_a_task_without_a_number_is_named(value: object) -> None:
    with pytest.raises(DatasetError, match=r"curriculum_key is 'level', but task train/1 has"):
        easy_to_hard(tasks(1, value), "level")


def test_weights_by_hand() -> None:
    """Target 0.5, width 0.25: a mean of 0.75 is one width away, 0 and 1 are two."""
    order = DifficultyOrder(5, 0, 2, SETTINGS)
    for task, reward in ((0, 0.5), (1, 0.75), (2, 1.0), (3, 8.0)):
        order.observe(task, reward)
    assert order.weights().tolist() == pytest.approx([1.0, exp(-0.5), exp(-2.0), 0.05, 1.0])
    order.observe(2, 0.0)  # half of the way from 1 to 0
    assert order.weights()[2] == 1.0


def test_tasks_near_the_target_are_drawn_more_often_and_none_is_dropped() -> None:
    """Of 40 tasks a quarter has mean reward 0.5, the others 0 or 1: weights 1 and exp(-2)."""
    order = DifficultyOrder(40, 7, 4, SETTINGS)
    counts: Counter[int] = Counter()
    for _ in range(1000):
        for task in order.draw():
            counts[task] += 1
            order.observe(task, 0.5 if task < 10 else float(task % 2))
    suitable = sum(counts[task] for task in range(10)) / 10
    others = sum(counts[task] for task in range(10, 40)) / 30
    assert 4.0 < suitable / others < 10.0  # 7.4 with replacement; a little less without
    assert min(counts.values()) > 10


def test_parts_of_a_mixture_are_drawn_by_their_success_and_resume_exactly() -> None:
    """Of three parts with 40 tasks each one is always solved, one never, one half of the time. What is known of a part
    holds for its tasks that were not drawn yet. Red where every task has a mean of its own, and where `state` leaves
    the counts out."""
    names = ["solved", "never", "half"]
    rows = [Task(id=f"t/{i}", index=i, row={"environment": names[i % 3]}) for i in range(120)]
    sampling = SamplingConfig(order="difficulty", difficulty_key="environment")
    order, counts = make_order(rows, sampling, seed=3, batch_size=6), Counter[str]()
    for step in range(40):
        if step == 25:
            state = json.loads(json.dumps(order.state()))
            again = make_order(rows, sampling, seed=3, batch_size=6)
            again.restore(state)
        for task in order.draw():
            counts[names[task % 3]] += 1
            order.observe(task, (1.0, 0.0, float(step % 2))[task % 3])
    for step in range(25, 40):
        for task in again.draw():
            again.observe(task, (1.0, 0.0, float(step % 2))[task % 3])
    assert again.state() == order.state()
    assert counts["half"] > 160  # of 240, by weights of about 1 to exp(-2) twice
    assert min(counts.values()) > 5


def test_a_shared_mean_is_of_all_groups_first_and_of_the_last_ones_later() -> None:
    order = DifficultyOrder(3, 0, 1, SETTINGS, shared=["a", "b", "a"])
    for reward in (1.0, 0.0, 0.5):
        order.observe(0, reward)
    assert order.weights().tolist() == pytest.approx([1.0, 1.0, 1.0])  # the mean is 0.5, the target
    for _ in range(17):
        order.observe(2, 0.5)
    order.observe(0, 1.0)  # the 21st moves the mean by a twentieth of the way
    assert order.weights().tolist() == pytest.approx([exp(-0.5 * (0.025 / 0.25) ** 2), 1.0, exp(-0.005)])


def test_a_key_that_a_task_lacks_or_the_order_does_not_read_is_refused() -> None:
    with pytest.raises(DatasetError, match="difficulty_key is 'environment', but task train/0 has no such field"):
        make_order(tasks(1), SamplingConfig(order="difficulty", difficulty_key="environment"), seed=0, batch_size=1)
    with pytest.raises(ValueError, match="belongs to order difficulty, and order is shuffled"):
        SamplingConfig(difficulty_key="environment")


def test_unseen_tasks_come_before_unsuitable_ones() -> None:
    order = DifficultyOrder(200, 1, 10, SETTINGS.model_copy(update={"difficulty_floor": 1e-9}))
    first = order.draw()
    for task in first:
        order.observe(task, 9.0)
    assert not set(first) & {task for _ in range(10) for task in order.draw()}


@given(
    num_tasks=st.integers(1, 30),
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    stops=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_a_resumed_order_draws_the_same_and_nothing_twice(
    num_tasks: int, batch_size: int, seed: int, stops: list[bool]
) -> None:
    """Red when `state` leaves the means or the number of draws out."""
    straight, resumed = (DifficultyOrder(num_tasks, seed, batch_size, SETTINGS) for _ in range(2))
    for stop in stops:
        if stop:
            state = json.loads(json.dumps(resumed.state()))
            resumed = DifficultyOrder(num_tasks, seed, batch_size, SETTINGS)
            resumed.restore(state)
        batch = resumed.draw()
        assert batch == straight.draw()
        assert len(set(batch)) == min(batch_size, num_tasks)
        for task in batch:
            straight.observe(task, task / num_tasks)
            resumed.observe(task, task / num_tasks)


def test_a_state_of_another_order_is_refused() -> None:
    state = TaskOrder(10, 0, 4).state()
    with pytest.raises(ConfigError, match="order was 'shuffled', is now 'difficulty'"):
        DifficultyOrder(10, 0, 4, SETTINGS).restore(state)
    with pytest.raises(ConfigError, match="order was 'difficulty', is now 'shuffled'"):
        TaskOrder(10, 0, 4).restore(DifficultyOrder(10, 0, 4, SETTINGS).state())


def test_the_settings_choose() -> None:
    assert isinstance(make_order(tasks(1, 2), SamplingConfig(), seed=0, batch_size=1), TaskOrder)
    order = make_order(tasks(1, 2), SETTINGS, seed=0, batch_size=1)
    assert isinstance(order, DifficultyOrder)
    assert order.num_batches(3) == 6


def test_sequential_tasks_come_as_they_are_in_every_epoch():
    order = make_order(tasks(*range(5)), SamplingConfig(order="sequential"), seed=3, batch_size=2)
    assert [order.draw() for _ in range(5)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    shuffled = make_order(tasks(*range(5)), SamplingConfig(), seed=3, batch_size=2)
    with pytest.raises(ConfigError, match="order was 'sequential', is now 'shuffled'"):
        shuffled.restore(order.state())
