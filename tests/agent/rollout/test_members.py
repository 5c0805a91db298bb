"""Workflows that make whole groups: one attempt, cut into rollouts; its slots, its failures, its retries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_serving import FakeServing, MakeRunner, make_call, make_task

from sharpen.agent.rollout.in_process import Attempt
from sharpen.agent.rollout.retries import Ending
from sharpen.agent.rollout.runner import divide
from sharpen.types import Call, CallStatus, Outcome, Rollout


@dataclass
class Output:
    """What a workflow gives for one rollout, and which calls it says are its own."""

    reward: float
    calls: tuple[int, ...]
    call_rewards: dict[int, float]
    step_rewards: dict[int, float] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)


def whole(workflow: Any) -> Any:
    workflow.whole_groups = True
    return workflow


def one_each(group_size: int) -> list[Output]:
    """The k-th call is the k-th rollout's, with k as its reward."""
    return [Output(float(k), (k,), {k: float(k)}) for k in range(group_size)]


def cut(calls: list[Call], endings: list[Ending]) -> list[tuple[tuple[Call, ...], Ending]]:
    whole = Ending(outcome=Outcome.OK, members=tuple(endings))
    attempt = Attempt(ending=whole, calls=tuple(calls), counts={"forks": 6.0}, seconds=1.0, num_answers=len(calls))
    parts = divide(attempt, len(endings))
    assert all(part.counts == {"forks": 6.0 / len(endings)} for part in parts)
    return [(part.calls, part.ending) for part in parts]


def shape(calls: tuple[Call, ...]) -> list[tuple[int, int | None, int | None]]:
    return [(call.index, call.parent, call.request) for call in calls]


def test_calls_go_where_the_workflow_says_and_are_numbered_anew():
    calls = [
        make_call(0),  # asked for by rollout 1
        make_call(1),
        make_call(2, parent=0),
        make_call(3, parent=2),  # goes on from a call of rollout 1 that the workflow says nothing of
        make_call(4),  # nobody's: the first one's
    ]
    first = Ending(outcome=Outcome.OK, reward=1.0, calls=(1,), call_rewards={1: 1.0})
    steps = {"call_rewards": {0: 0.5, 3: 2.0}, "step_rewards": {3: 2.0}, "states": {0: "s"}}
    second = Ending(outcome=Outcome.OK, reward=2.0, calls=(0, 3), **steps)
    (mine, my_ending), (yours, your_ending) = cut(calls, [first, second])
    assert shape(mine) == [(0, None, None), (1, None, None)]
    assert shape(yours) == [(0, None, None), (1, 0, None), (2, 1, None)]
    assert my_ending.call_rewards == {0: 1.0}
    assert your_ending.call_rewards == {0: 0.5, 2: 2.0}
    assert (your_ending.step_rewards, your_ending.states) == ({2: 2.0}, {0: "s"})


def test_a_parent_in_another_rollout_is_passed_over():
    calls = [make_call(0), make_call(1, parent=0), make_call(2, parent=1)]
    endings = [Ending(outcome=Outcome.OK, calls=(0, 2)), Ending(outcome=Outcome.OK, calls=(1,))]
    (first, _), (second, _) = cut(calls, endings)
    assert shape(first) == [(0, None, None), (1, 0, None)]  # its prompt begins with call 0 too
    assert shape(second) == [(0, None, None)]


def test_choices_asked_for_together_are_one_rollout_each():
    calls = [make_call(index, request=0) for index in range(3)]
    failed = [Ending(outcome=Outcome.TIMEOUT)] * 3
    assert [shape(own) for own, _ in cut(calls, failed)] == [[(0, None, None)]] * 3
    kept = [Ending(outcome=Outcome.OK, calls=(0, 2)), Ending(outcome=Outcome.OK, calls=(1,))]
    assert [shape(own) for own, _ in cut(calls, kept)] == [[(0, None, 0), (1, None, 0)], [(0, None, None)]]


def test_one_attempt_makes_the_group(make_runner: MakeRunner, serving: FakeServing):
    sizes, seen = [], list[Rollout]()

    async def workflow(task: Any, model: Any, group_size: int = 1) -> Any:
        sizes.append(group_size)
        for _ in range(group_size):
            model.call()
        return one_each(group_size)

    runner = make_runner(whole(workflow), group_size=3)
    group = runner.submit(make_task(), "g", 0, on_rollout=seen.append, open_baseline=serving.open).result()
    assert sorted(sizes) == [1, 3]  # the baseline is by itself
    assert [(one.id, one.index, one.reward, len(one.calls)) for one in group.rollouts] == [
        ("g/0", 0, 0.0, 1),
        ("g/1", 1, 1.0, 1),
        ("g/2", 2, 2.0, 1),
    ]
    assert group.baseline is not None
    assert (group.baseline.id, group.baseline.reward) == ("g/3", 0.0)
    assert sorted(one.id for one in seen) == ["g/0", "g/1", "g/2", "g/3"]
    assert sorted(serving.sessions) == ["g/0", "g/3"]
    assert [serving.sessions[key][0].allowed for key in ("g/0", "g/3")] == [3, 1]


def test_a_rollout_that_fails_for_itself_is_not_repeated(make_runner: MakeRunner):
    async def workflow(task: Any, model: Any, group_size: int = 1) -> Any:
        for _ in range(group_size):
            model.call()
        return [*one_each(group_size - 1), ValueError("nothing for this one")]

    group = make_runner(whole(workflow), group_size=2, max_attempts=3).submit(make_task(), "g", 0).result()
    assert [one.outcome for one in group.rollouts] == [Outcome.OK, Outcome.WORKFLOW_ERROR]
    assert (group.rollouts[1].error, group.rollouts[1].reward) == ("ValueError: nothing for this one", None)
    assert group.attempts == ()
    assert [call.status for call in group.rollouts[0].calls] == [CallStatus.USED, CallStatus.LEFT_OUT]


def test_an_attempt_that_fails_is_repeated_as_one(make_runner: MakeRunner):
    tried = []

    async def workflow(task: Any, model: Any, group_size: int = 1) -> Any:
        tried.append(group_size)
        for _ in range(group_size):
            model.call(request=0)
        if len(tried) < 3:
            raise RuntimeError("not yet")
        return one_each(group_size)

    group = make_runner(whole(workflow), group_size=2, max_attempts=3).submit(make_task(), "g", 0).result()
    assert tried == [2, 2, 2]
    assert [(one.outcome, one.attempt) for one in group.rollouts] == [(Outcome.OK, 2)] * 2
    failed = [(one.id, one.attempt, len(one.calls)) for one in group.attempts]
    assert failed == [("g/0", 0, 1), ("g/1", 0, 1), ("g/0", 1, 1), ("g/1", 1, 1)]


@pytest.mark.parametrize(("limit", "most"), [(4, 4), (5, 4), (8, 8), (3, 4)])
def test_a_group_takes_as_many_slots_as_it_has_rollouts(make_runner: MakeRunner, limit: int, most: int):
    """Red with one slot for each attempt: 24 rollouts at a time. A group that is larger than the limit runs alone."""
    now, peak = 0, 0

    async def workflow(task: Any, model: Any, group_size: int = 1) -> Any:
        nonlocal now, peak
        now += group_size
        peak = max(peak, now)
        await asyncio.sleep(0.01)
        now -= group_size
        return [Output(1.0, (), {}) for _ in range(group_size)]

    runner = make_runner(whole(workflow), group_size=4, max_concurrent_rollouts=limit)
    groups = runner.run([make_task(number) for number in range(6)], group_ids=[f"g{number}" for number in range(6)])
    assert [len(group.rollouts) for group in groups] == [4] * 6
    assert peak == most
