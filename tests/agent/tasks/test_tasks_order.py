"""The order of tasks: permutations, no repeats within a batch, and a position that survives a restart."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.agent.tasks.order import TaskOrder, hold_out
from sharpen.errors import ConfigError

sizes = st.integers(min_value=1, max_value=40)


@given(num_tasks=sizes, batch_size=sizes, seed=st.integers(), shuffle=st.booleans())
def test_each_epoch_is_a_permutation(num_tasks: int, batch_size: int, seed: int, shuffle: bool) -> None:
    order = TaskOrder(num_tasks, seed, batch_size, shuffle)
    drawn = [task for _ in range(order.num_batches(3)) for task in order.draw()]
    for epoch in range(3):
        assert sorted(drawn[epoch * num_tasks : (epoch + 1) * num_tasks]) == list(range(num_tasks))


@given(batch_size=sizes, more=st.integers(min_value=0, max_value=20), seed=st.integers(), shuffle=st.booleans())
def test_no_task_twice_in_a_batch(batch_size: int, more: int, seed: int, shuffle: bool) -> None:
    order = TaskOrder(batch_size + more, seed, batch_size, shuffle)
    for _ in range(12):
        assert len(set(order.draw())) == batch_size


@given(num_tasks=sizes, batch_size=sizes, seed=st.integers(), stops=st.lists(st.booleans(), min_size=12, max_size=12))
def test_trap_24_a_resumed_order_neither_skips_nor_repeats(
    num_tasks: int, batch_size: int, seed: int, stops: list[bool]
) -> None:
    """Red when `restore` forgets `carried` or the position (order.py, `_start_epoch(state["epoch"], ...)`)."""
    straight = TaskOrder(num_tasks, seed, batch_size)
    resumed = TaskOrder(num_tasks, seed, batch_size)
    counts: Counter[int] = Counter()
    for stop in stops:
        if stop:
            state = json.loads(json.dumps(resumed.state()))
            resumed = TaskOrder(num_tasks, seed, batch_size)
            resumed.restore(state)
        batch = resumed.draw()
        assert batch == straight.draw()
        counts.update(batch)
    # Every task as often as asked: counts differ by one at most, at any moment.
    assert max(counts.values()) - min(counts.get(task, 0) for task in range(num_tasks)) <= 1


@given(
    num_tasks=sizes,
    batch_size=sizes,
    seed=st.integers(),
    counts=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=20),
)
def test_further_tasks_advance_the_position_by_exactly_those_drawn(
    num_tasks: int, batch_size: int, seed: int, counts: list[tuple[int, bool]]
) -> None:
    """Refill draws what it needs: over all draws every epoch is still whole, also across restarts.

    Red when `state` leaves `needed` out and `restore` guesses it from the batch size.
    """
    straight, resumed = TaskOrder(num_tasks, seed, batch_size), TaskOrder(num_tasks, seed, batch_size)
    drawn: list[int] = []
    for count, stop in counts:
        if stop:
            state = json.loads(json.dumps(resumed.state()))
            resumed = TaskOrder(num_tasks, seed, batch_size)
            resumed.restore(state)
        for size in (None, count):
            taken = resumed.draw(size)
            assert taken == straight.draw(size)
            assert len(set(taken)) == min(len(taken), num_tasks) or len(taken) > num_tasks
            drawn += taken
    assert len(drawn) == sum(batch_size + count for count, _ in counts)
    for epoch in range(len(drawn) // num_tasks):
        assert sorted(drawn[epoch * num_tasks : (epoch + 1) * num_tasks]) == list(range(num_tasks))


def test_the_order_depends_on_the_seed_and_the_epoch() -> None:
    first, second = TaskOrder(50, 0, 50), TaskOrder(50, 1, 50)
    epochs = [first.draw(), first.draw(), second.draw()]
    assert epochs[0] != epochs[1]
    assert epochs[0] != epochs[2]
    assert TaskOrder(5, 0, 3, shuffle=False).draw() == [0, 1, 2]


def test_a_position_of_another_run_is_refused() -> None:
    state = TaskOrder(10, 0, 4).state()
    with pytest.raises(ConfigError, match="num_tasks was 10, is now 11"):
        TaskOrder(11, 0, 4).restore(state)
    with pytest.raises(ConfigError, match="order was 'shuffled', is now 'curriculum by level'"):
        TaskOrder(10, 0, 4, shuffle=False, name="curriculum by level").restore(state)
    with pytest.raises(ConfigError, match="batch_size"):
        TaskOrder(10, 0, 0)


@given(num_tasks=st.integers(min_value=3, max_value=7000), seed=st.integers())
def test_held_out_tasks_are_apart(num_tasks: int, seed: int) -> None:
    train, held = hold_out(range(num_tasks), seed)
    assert sorted(train + held) == list(range(num_tasks))
    assert len(held) == min(512, max(1, num_tasks // 10))


@pytest.mark.parametrize("tasks", [[0], [0, 1]])
def test_a_dataset_of_one_or_two_tasks_is_not_split(tasks: list[int]) -> None:
    """Red where one of two tasks is held out: the run learns from half of its data, and one task shows nothing."""
    assert hold_out(tasks, 0) == (tasks, [])
